"""Libraries that mooncake's wheels need of the system, and how to install missing ones."""

import subprocess
from importlib.util import find_spec
from pathlib import Path

from worker.errors import MissingLibrary

# System libraries that the wheels link against: Debian package, or another remedy.
APT_PACKAGES = {
    "libibverbs.so": "libibverbs1",
    "libmlx5.so": "ibverbs-providers",
    "librdmacm.so": "librdmacm1",
    "libnuma.so": "libnuma1",
    "libcurl.so": "libcurl4",
}
APT_INSTALL = "apt-get install -y --no-install-recommends"
OTHER_LIBRARIES = {
    "libcuda.so": "the NVIDIA driver; without a GPU use the CPU wheel, pip install 'kvlane[cpu]'",
    "libcudart.so": "the CUDA runtime of the wheel's CUDA version: pip install 'kvlane[cuda]'",
}


def check_installed() -> None:
    """Look for the wheel and its system libraries without loading them, or MissingLibrary."""
    spec = find_spec("mooncake")
    if spec is None or not spec.submodule_search_locations:
        raise explain(ModuleNotFoundError("mooncake"))
    for folder in spec.submodule_search_locations:
        for engine in Path(folder).glob("engine*.so"):
            try:
                linked = subprocess.run(["ldd", str(engine)], capture_output=True, text=True)
            except OSError:  # no ldd: the worker will name missing ones
                return
            check_links(linked.stdout)


def check_links(ldd_output: str) -> None:
    """Raise MissingLibrary if ldd misses a library. CUDA's do not count: torch brings them."""
    lines = ldd_output.splitlines()
    absent = [line.split()[0] for line in lines if line.endswith("=> not found")]
    known = APT_PACKAGES.items()
    packages = {name: package for name in absent for lib, package in known if name.startswith(lib)}
    if packages:
        raise MissingLibrary(
            f"mooncake needs the system libraries {', '.join(packages)}: "
            f"{APT_INSTALL} {' '.join(packages.values())}"
        )


def explain(error: ImportError) -> MissingLibrary:
    """`error`, with the packages to install against it."""
    if isinstance(error, ModuleNotFoundError):
        return MissingLibrary(
            "transport mooncake needs mooncake-transfer-engine: pip install 'kvlane[cpu]', "
            "or 'kvlane[cuda]' on a machine with NVIDIA GPUs (never both wheels in one venv)"
        )
    text = str(error)
    packages = {library: f"{APT_INSTALL} {package}" for library, package in APT_PACKAGES.items()}
    for library, remedy in (packages | OTHER_LIBRARIES).items():
        if library in text:
            return MissingLibrary(f"mooncake needs {library}: {remedy} ({text})")
    return MissingLibrary(f"mooncake is installed but cannot be loaded: {text}")
