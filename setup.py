"""Builds the native kernels where a C++ compiler is at hand; without one the torch reference runs.

The library has a plain C interface and is loaded with ctypes: it links neither Python nor torch, so one build serves
every version of both.
"""

from __future__ import annotations

import logging
import os
import platform
import sys
from pathlib import Path
from typing import Any

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

SOURCES = (
    "codec",
    "map",
    "codebook",
    "calibrate",
    "cpu",
    "layout",
    "look",
    "pool",
    "observe",
    "options",
    "apply",
    "project",
    "steps",
    "kernels_portable",
)
X86_SOURCES = {
    "kernels_avx2": ("-mavx2", "-mfma", "-mf16c"),
    "kernels_avx512": (
        *(f"-mavx512{part}" for part in ("f", "bw", "vl", "dq", "vbmi", "vbmi2")),
        "-mfma",
        "-mf16c",
        "-mprefer-vector-width=512",
        # Wrong alarms in GCC 12's own headers.
        "-Wno-uninitialized",
        "-Wno-maybe-uninitialized",
    ),
}
#: Sums and comparisons that must equal numpy's to the last bit are not contracted to fused multiply-adds.
EXACT = {"codebook": ("-ffp-contract=off",)}
COMMON = (
    "-std=c++17",
    "-O3",
    "-fPIC",
    "-fvisibility=hidden",
    "-fno-math-errno",
    "-fno-trapping-math",
    "-Wall",
    "-Wextra",
)


def flags() -> dict[str, tuple[str, ...]]:
    """Each source file and the flags that it needs beside `COMMON`."""
    x86 = platform.machine().lower() in ("x86_64", "amd64") and sys.maxsize > 2**32
    every = {name: EXACT.get(name, ()) for name in SOURCES} | (X86_SOURCES if x86 else {})
    return {f"native/{name}.cpp": (*more, *(("-DDAYPACK_X86",) if x86 else ())) for name, more in every.items()}


class BuildNative(build_ext):
    """Compiles each file with its own flags. Every failure means: no native kernels, and one line that says so."""

    def get_ext_filename(self, ext_name: str) -> str:
        return str(Path(*ext_name.split("."))) + (".dll" if sys.platform == "win32" else ".so")

    def build_extension(self, ext: Extension) -> None:
        extra = tuple(os.environ.get("DAYPACK_CXXFLAGS", "").split())
        target = Path(self.get_ext_fullpath(ext.name))
        target.parent.mkdir(parents=True, exist_ok=True)
        try:
            objects: list[str] = []
            for source, more in flags().items():
                objects += self.compiler.compile(
                    [source],
                    output_dir=self.build_temp,
                    extra_postargs=[*COMMON, *more, *extra],
                    depends=ext.depends,
                )
            self.compiler.link_shared_object(
                objects, str(target), extra_postargs=[*extra, "-pthread"], target_lang="c++"
            )
        except Exception as error:
            logging.getLogger("daypack").warning(
                "daypack: the native kernels were not built (%s); the torch reference runs instead, which is slower",
                error,
            )


def wheel_command() -> dict[str, Any]:
    """A wheel for any Python 3 on this platform, since the library knows nothing of Python."""
    try:
        from setuptools.command.bdist_wheel import bdist_wheel
    except ImportError:
        return {}

    class Wheel(bdist_wheel):
        def get_tag(self) -> tuple[str, str, str]:
            return "py3", "none", super().get_tag()[2]

    return {"bdist_wheel": Wheel}


setup(
    ext_modules=[
        Extension(
            "daypack.kernels._native",
            sources=list(flags()),
            depends=[str(path) for path in Path("native").glob("*.h")],
            optional=True,
        )
    ],
    cmdclass={"build_ext": BuildNative, **wheel_command()},
)
