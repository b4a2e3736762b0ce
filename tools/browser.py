"""A real browser for the tests of the page: Debian's Chromium and its driver,
installed where that is possible (root, apt-get).

Without one those tests are skipped, and say so.
"""

import os
import shutil
import subprocess
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "src"))

from hilt.core.progress import Progress  # needs no package

if __name__ == "__main__" and shutil.which("chromedriver") is None:
    apt = ["apt-get", "-qq", "-o", "DPkg::Lock::Timeout=60"]
    if os.geteuid() != 0 or shutil.which("apt-get") is None:
        raise SystemExit(
            print("no chromedriver here, and installing it needs root and apt-get: the browser tests will be skipped")
        )
    print("installing chromium, once", flush=True)
    progress, environment = Progress(), os.environ | {"DEBIAN_FRONTEND": "noninteractive"}
    for arguments in (["update"], ["install", "-y", "--no-install-recommends", "chromium", "chromium-driver"]):
        with progress.phase(f"apt-get {arguments[0]}"):
            subprocess.run([*apt, *arguments], env=environment, stdout=subprocess.DEVNULL, timeout=600)
