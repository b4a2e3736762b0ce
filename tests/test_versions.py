"""The versions that pyproject.toml promises, as far as one environment can tell.
`tools/versions.py` tries the others."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PYTHONS = ("3.10", "3.11", "3.12", "3.13")

NEWER = {
    # What Python 3.13 has and 3.10 has not
    "tomllib": "",
    "asyncio": (
        "Barrier BrokenBarrierError EventLoop QueueShutDown Runner TaskGroup Timeout "
        "eager_task_factory timeout timeout_at"
    ),
    "base64": "z85decode z85encode",
    "builtins": "BaseExceptionGroup ExceptionGroup PythonFinalizationError",
    "collections.abc": "Buffer",
    "contextlib": "chdir",
    "copy": "replace",
    "csv": "QUOTE_NOTNULL QUOTE_STRINGS",
    "ctypes": "BigEndianUnion LittleEndianUnion SIZEOF_TIME_T c_time_t",
    "datetime": "UTC",
    "enum": (
        "EnumCheck EnumDict EnumType FlagBoundary ReprEnum StrEnum global_enum member nonmember show_flag_values verify"
    ),
    "fcntl": "FICLONE FICLONERANGE F_GETOWN_EX F_SETOWN_EX F_SEAL_FUTURE_WRITE",
    "glob": "translate",
    "hashlib": "file_digest",
    "http": "HTTPMethod",
    "inspect": "BufferFlags getasyncgenlocals getasyncgenstate getmembers_static ismethodwrapper markcoroutinefunction",
    "itertools": "batched",
    "locale": "getencoding",
    "logging": "getHandlerByName getHandlerNames getLevelNamesMapping",
    "math": "cbrt exp2 fma sumprod",
    "mimetypes": "guess_file_type",
    "mmap": "MAP_NORESERVE MAP_STACK",
    "os": "login_tty posix_openpt process_cpu_count setns timerfd_create timerfd_gettime timerfd_settime unshare",
    "os.path": "isdevdrive isjunction splitroot",
    "pathlib": "UnsupportedOperation",
    "queue": "ShutDown",
    "random": "binomialvariate",
    "re": "NOFLAG PatternError",
    "socket": "SO_BINDTOIFINDEX SO_INCOMING_CPU TCP_CC_INFO TCP_FASTOPEN_CONNECT TCP_REPAIR TCP_TIMESTAMP TCP_ULP",
    "sqlite3": "Blob",
    "statistics": "kde kde_random",
    "sys": "activate_stack_trampoline exception monitoring",
    "threading": "setprofile_all_threads settrace_all_threads",
    "types": "get_original_bases",
    "typing": "LiteralString Never NoDefault NotRequired ReadOnly Required Self TypeAliasType TypeIs "
    "TypeVarTuple Unpack assert_never assert_type clear_overloads dataclass_transform "
    "get_overloads get_protocol_members is_protocol override reveal_type",
    "unittest": "doModuleCleanups enterModuleContext",
    "warnings": "deprecated",
    # What torch 2.13 has and 2.6 has not
    "torch": "AcceleratorError float4_e2m1fn_x2 float8_e8m0fnu hash_tensor thread_safe_generator",
    "torch.accelerator": "Graph empty_cache empty_host_cache get_device_capability "
    "get_memory_info max_memory_allocated max_memory_reserved memory_allocated memory_reserved memory_stats "
    "reset_accumulated_memory_stats reset_peak_memory_stats",
    "torch.autograd": "enforce_grad_layout_policy",
    "torch.autograd.graph": "region_activation_memory_budget set_warn_on_accumulate_grad_stream_mismatch",
    "torch.backends": "kleidiai miopen python_native",
    "torch.backends.cuda": "is_ck_sdpa_available preferred_rocm_fa_library",
    "torch.compiler": "get_default_backend is_exporting load_cache_artifacts nested_compile_region "
    "save_cache_artifacts",
    "torch.cpu": "get_capabilities is_initialized",
    "torch.cuda": (
        "AcceleratorError GreenContext caching_allocator_disabled get_stream_from_external "
        "host_memory_stats is_tf32_supported"
    ),
    "torch.distributed": "QueueEmptyError all_gather_single record_comm reduce_scatter_single shrink_group",
    "torch.distributed.checkpoint": (
        "HuggingFaceStorageReader HuggingFaceStorageWriter QuantizedHuggingFaceStorageReader"
    ),
    "torch.distributed.fsdp": "DataParallelMeshDims share_comm_ctx",
    "torch.export": "AdditionalInputs draft_export",
    "torch.func": "debug_unwrap",
    "torch.library": "get_kernel register_autocast",
    "torch.mps": "compile_shader load_metallib",
    "torch.nn": "LinearCrossEntropyLoss LinearCrossEntropyOptions",
    "torch.nn.attention": "activate_flash_attention_impl current_flash_attention_impl list_flash_attention_impls",
    "torch.nn.functional": "ScalingType SwizzleType grouped_mm linear_cross_entropy scaled_grouped_mm scaled_mm",
    "torch.optim": "Muon",
    "torch.random": "thread_safe_generator",
    "torch.utils.checkpoint": "GraphExecGroup",
}
"""Names that the newest versions have and the lowest have not, found by comparing what `dir` says of
each module. Methods and arguments are not among them: ``tools/versions.py types`` knows Python's, and
tests that run in the lowest versions torch's."""

GONE = {
    *(
        "aifc",
        "asynchat",
        "asyncore",
        "audioop",
        "cgi",
        "cgitb",
        "crypt",
        "distutils",
        "imghdr",
        "imp",
        "lib2to3",
        "mailcap",
        "msilib",
    ),
    *("nis", "nntplib", "ossaudiodev", "pipes", "smtpd", "sndhdr", "spwd", "sunau", "telnetlib", "uu", "xdrlib"),
}
"""Modules that Python 3.10 has and 3.13 has not"""


def test_pyproject_agrees_with_itself():
    text = (ROOT / "pyproject.toml").read_text()
    assert f'requires-python = ">={PYTHONS[0]}"' in text
    assert f'target-version = "py{PYTHONS[0].replace(".", "")}"' in text, "or ruff lets newer syntax pass"
    assert tuple(re.findall(r'"Programming Language :: Python :: (3\.\d+)"', text)) == PYTHONS
    assert f"Python {PYTHONS[0]} to {PYTHONS[-1]}" in (ROOT / "README.md").read_text()


def test_src_uses_no_name_that_the_lowest_or_the_newest_versions_lack():
    assert [line for path in sorted((ROOT / "src").rglob("*.py")) for line in wrong(path.read_text(), path.name)] == []


@pytest.mark.parametrize(
    ("code", "found"),
    [
        ("import tomllib", "tomllib"),
        ("from tomllib import loads", "tomllib"),
        ("import os, imp", "imp"),
        ("from typing import Any, Self", "typing.Self"),
        ("from asyncio import TaskGroup as Group", "asyncio.TaskGroup"),
        ("import datetime as d\nd.datetime.now(d.UTC)", "datetime.UTC"),
        ("try:\n    pass\nexcept ExceptionGroup:\n    pass", "builtins.ExceptionGroup"),
        ("from torch.nn import functional as F\nF.grouped_mm(1, 2)", "torch.nn.functional.grouped_mm"),
        ("import torch\ntorch.optim.Muon([])", "torch.optim.Muon"),
        ("import torch\ntorch.optim.Adam([])\nself.Muon()", ""),
        ("def timeout(asyncio): asyncio.timeout", ""),
        ("from hilt.core import batched\nfrom .enum import StrEnum", ""),
    ],
)
def test_versions_find_missing_names(code: str, found: str):
    assert wrong(code, "x.py") == (
        [f"x.py:{code.count(chr(10), 0, code.index(found.split('.')[-1])) + 1}: {found}"] if found else []
    )


def wrong(code: str, file: str) -> list[str]:
    """``file:line: name`` of what is not in all versions. Most files are not parsed: none of the words is in them."""
    if not SUSPICIOUS.search(code):
        return []
    return sorted({f"{file}:{line}: {name}" for name, line in _used(ast.parse(code)) if _lacking(name)})


SUSPICIOUS = re.compile(r"\b(" + "|".join({*GONE, "tomllib", *" ".join(NEWER.values()).split()}) + r")\b")


def _lacking(name: str) -> bool:
    module, _, last = name.rpartition(".")
    return name in GONE or NEWER.get(name) == "" or last in NEWER.get(module, "").split()


def _used(tree: ast.AST) -> Iterator[tuple[str, int]]:
    """Dotted names of what is imported, with their lines."""
    known: dict[str, str] = {}  # what a name in this file stands for
    nodes = list(ast.walk(tree))
    for node in nodes:
        if isinstance(node, ast.Import):
            for alias in node.names:
                top = alias.name.partition(".")[0]
                known[alias.asname or top] = alias.name if alias.asname else top
                yield alias.name, node.lineno
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield node.module, node.lineno
            for alias in node.names:
                known[alias.asname or alias.name] = f"{node.module}.{alias.name}"
                yield f"{node.module}.{alias.name}", node.lineno
    for node in nodes:
        if isinstance(node, ast.Attribute) and (name := _dotted(node, known)):
            yield name, node.lineno
        elif isinstance(node, ast.Name) and node.id not in known:
            yield f"builtins.{node.id}", node.lineno


def _dotted(node: ast.expr, known: dict[str, str]) -> str:
    if isinstance(node, ast.Attribute):
        base = _dotted(node.value, known)
        return f"{base}.{node.attr}" if base else ""
    return known.get(node.id, "") if isinstance(node, ast.Name) else ""
