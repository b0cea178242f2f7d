"""Servers that run on Java, with what makes them start in seconds."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import ClassVar, Literal

from . import maven
from .base import Server
from .cache import cached

Jit = Literal["fast-start", "normal"]


class JarServer(Server):
    """A server that Java runs from jars."""

    jars: ClassVar[maven.Jars]

    def missing(self) -> str | None:
        if maven.java() is None:
            return f"{self.name} needs Java; {maven.INSTALL.format('default-jre-headless')}"
        return self.jars.missing()

    def fetched(self) -> bool:
        return self.jars.present()

    def fetch(self) -> None:
        self._libraries = self.jars.fetch()

    def environment(self) -> Mapping[str, str]:
        # Sorted, because a class archive holds only for the very same class path.
        return {"CLASSPATH": ":".join(map(str, sorted(self._libraries.glob("*.jar"))))}


class JavaServer(JarServer):
    """`jit="normal"` starts slower and runs faster, for benchmarks."""

    main_class: ClassVar[str]
    heap: ClassVar[str]
    benchmark_heap: ClassVar[str] = "1g"
    options: ClassVar[tuple[str, ...]] = ()

    def __init__(self, *, settings: Mapping[str, str] | None = None, jit: Jit = "fast-start") -> None:
        super().__init__(settings=settings)
        self.jit = jit
        self._archive: Path | None = None
        self._record_to: Path | None = None

    def fetch(self) -> None:
        super().fetch()
        if self._record_to is None:
            key = f"{self.jars.key}-classes-{_java_identity()}"
            announce = f"recording the classes of {self.name} for faster starts, once"
            self._archive = cached(key, self._record, announce) / "classes.jsa"

    def java(self, main_class: str, *arguments: str) -> Sequence[str]:
        fast = self.jit == "fast-start"
        tuned = ["-XX:TieredStopAtLevel=1", f"-Xmx{self.heap}"] if fast else [f"-Xmx{self.benchmark_heap}"]
        share = f"-XX:SharedArchiveFile={self._archive}"
        if self._record_to:
            share = f"-XX:ArchiveClassesAtExit={self._record_to}"
        flags = [*tuned, "-XX:+UseSerialGC", "-Xshare:auto", share]
        return [str(maven.java()), *flags, *self.options, main_class, *arguments]

    def _record(self, target: Path) -> None:
        recorder = type(self)()
        recorder._record_to = target / "classes.jsa"
        with recorder:
            recorder.stop()


def _java_identity() -> str:
    program = Path(str(maven.java())).resolve()
    return hashlib.sha256(f"{program} {program.stat().st_mtime_ns}".encode()).hexdigest()[:12]
