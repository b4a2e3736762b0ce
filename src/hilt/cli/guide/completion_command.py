"""``hilt completion bash|zsh|fish``: a script with which a shell completes commands, options, recipes, settings, tasks
and devices; the script asks `hilt completion SHELL --line LINE`."""

from __future__ import annotations

from enum import Enum
from typing import Annotated

import typer

from hilt.cli.guide.candidates import Candidate, candidates
from hilt.core.errors import HiltError

app = typer.Typer(add_completion=False)

BASH = """\
_hilt() {
    local one
    COMPREPLY=()
    while IFS= read -r one; do COMPREPLY+=("$one"); done \\
        < <(hilt completion bash --line "${COMP_LINE:0:COMP_POINT}" 2>/dev/null)
    case "${COMPREPLY[0]}" in *=|*/) compopt -o nospace 2>/dev/null ;; esac
}
complete -o default -F _hilt hilt
"""
ZSH = """\
#compdef hilt
_hilt() {
    local one
    local -a plain open
    while IFS= read -r one; do
        case "${one%%:*}" in *=|*/) open+=("$one") ;; *) plain+=("$one") ;; esac
    done < <(hilt completion zsh --line "${(j: :)words[1,CURRENT]}" 2>/dev/null)
    if (( ${#plain} + ${#open} )); then
        (( ${#plain} )) && _describe 'hilt' plain
        (( ${#open} )) && _describe 'hilt' open -S ''
    else
        _files
    fi
}
compdef _hilt hilt
"""
FISH = """\
function __hilt_complete
    set -l found (hilt completion fish --line (commandline -cp | string collect) 2>/dev/null)
    if test (count $found) -gt 0
        printf '%s\\n' $found
    else
        __fish_complete_path (commandline -ct)
    end
end
complete -c hilt -f -a '(__hilt_complete)'
"""


class Shell(str, Enum):
    """The shells for which there is a script."""

    bash = "bash"
    zsh = "zsh"
    fish = "fish"


SCRIPTS = {Shell.bash: BASH, Shell.zsh: ZSH, Shell.fish: FISH}
LINE = "Print what completes this beginning of a command line, as the script asks."


@app.command("completion")
def completion(
    shell: Annotated[Shell, typer.Argument(show_default=False, help="The shell that the script is for.")],
    line: Annotated[str | None, typer.Option("--line", metavar="LINE", help=LINE, show_default=False)] = None,
) -> None:
    """Print a script that completes commands, options, recipes, settings and tasks.

    bash, in ~/.bashrc: eval "$(hilt completion bash)"

    zsh, in ~/.zshrc after compinit: eval "$(hilt completion zsh)"

    fish, once: hilt completion fish > ~/.config/fish/completions/hilt.fish
    """
    if line is None:
        typer.echo(SCRIPTS[shell], nl=False)
        return
    try:
        typed, found = candidates(line)
    except HiltError:  # a recipe that cannot be read: the command itself reports it
        return
    for one in found:
        typer.echo(written_for(shell, typed, one))


def written_for(shell: Shell, typed: str, one: Candidate) -> str:
    """A candidate as the script of a shell reads it."""
    if shell is Shell.bash:  # which begins a new word behind = and :
        return one.value[max(typed.rfind("="), typed.rfind(":")) + 1 :]
    if shell is Shell.zsh:
        return f"{one.value.replace(':', chr(92) + ':')}:{one.meaning}"
    return f"{one.value}\t{one.meaning}"
