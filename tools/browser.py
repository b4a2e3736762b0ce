"""A real browser for the tests of the page: Debian's Chromium and its driver, installed where that is possible (root, apt-get).

Without one those tests are skipped, and say so.
"""

import os
import shutil
import subprocess

if __name__ == "__main__" and shutil.which("chromedriver") is None:
    apt = ["apt-get", "-qq", "-o", "DPkg::Lock::Timeout=60"]
    if os.geteuid() != 0 or shutil.which("apt-get") is None:
        raise SystemExit(print("no chromedriver here, and installing it needs root and apt-get: the browser tests will be skipped"))
    print("installing chromium, once", flush=True)
    for arguments in (["update"], ["install", "-y", "--no-install-recommends", "chromium", "chromium-driver"]):
        subprocess.run([*apt, *arguments], env=os.environ | {"DEBIAN_FRONTEND": "noninteractive"}, stdout=subprocess.DEVNULL, timeout=600)
