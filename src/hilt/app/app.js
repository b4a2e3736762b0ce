// What every page of the app does in the browser: the help and a few keys. Nothing here changes anything on the server.
if (!window.hiltHelp) {
  window.hiltHelp = () => {
    const dialog = document.querySelector(".hilt-help");
    if (dialog.open) return dialog.close();
    dialog.showModal(); // it moves the focus to the first button, which may be far below
    dialog.focus({ preventScroll: true });
    dialog.scrollTop = 0;
  };
  // What is shown while the server does not answer.
  window.hiltLost = (texts) => document.querySelectorAll("#popup > span").forEach((span, at) => (span.innerText = texts[at]));
  // The theme after this one: first the opposite of what the system has, so that something changes at the first click.
  window.hiltNextTheme = (theme) => {
    const [system, other] = matchMedia("(prefers-color-scheme: dark)").matches ? ["dark", "light"] : ["light", "dark"];
    return { auto: other, [other]: system, [system]: "auto" }[theme];
  };
  let before = "";
  document.addEventListener("keydown", (event) => {
    const typing = event.target.closest("input:not([type=checkbox]), textarea, select, [contenteditable]");
    if (typing || event.ctrlKey || event.metaKey || event.altKey) return;
    if (event.key === "?") hiltHelp();
    else if (event.key === "/") {
      const field = document.querySelector(".hilt-filter input");
      if (!field) return;
      field.focus();
    } else if (before === "g" && event.key === "r") location.href = "/";
    else {
      before = event.key;
      return;
    }
    before = "";
    event.preventDefault();
  });
  // Copies the command that stands beside a button; without a secure context there is no clipboard, and it is selected.
  window.hiltCopy = async (button) => {
    const code = button.closest(".hilt-command").querySelector("code");
    try {
      await navigator.clipboard.writeText(code.innerText);
    } catch {
      getSelection().selectAllChildren(code);
      document.execCommand("copy");
    }
    button.classList.add("done");
    setTimeout(() => button.classList.remove("done"), 1500);
  };
}
