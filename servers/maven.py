"""Java programs from Maven's central repository."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from . import process
from .cache import cache_folder, cached
from .errors import MissingError

COPY = "org.apache.maven.plugins:maven-dependency-plugin:3.8.1:copy-dependencies"
INSTALL = "install it with `sudo apt-get install -y --no-install-recommends {}`"


@dataclass(frozen=True)
class Jars:
    """Artifacts as `group:name:version`, with all they need; `managed_by` names a bill of versions."""

    key: str
    label: str
    size: str
    artifacts: tuple[str, ...]
    managed_by: str | None = None

    def present(self) -> bool:
        return (cache_folder() / self.key).is_dir()

    def missing(self) -> str | None:
        """The reason why the jars cannot be fetched, or None."""
        if self.present():
            return None
        if java() is None:
            return f"{self.label} comes with Maven, which needs Java; {INSTALL.format('default-jre-headless')}"
        if shutil.which("mvn") is None:
            return f"{self.label} comes with Maven, and there is no `mvn`; {INSTALL.format('maven')}"
        return None

    def fetch(self, unpack: Callable[[Path], None] | None = None) -> Path:
        """The folder of the jars, or of what `unpack` made of them in the same folder."""
        if sentence := self.missing():
            raise MissingError(sentence)

        def build(target: Path) -> None:
            self._download(target)
            if unpack:
                unpack(target)

        return cached(self.key, build, announce=f"fetching {self.label} ({self.size}) with Maven, once")

    def _download(self, target: Path) -> None:
        pom = target / "pom.xml"
        pom.write_text(self._pom())
        # Java takes the home folder from the list of users, which in a container may not know this one.
        home = f"-Duser.home={Path.home()}"
        command = ["mvn", home, "-q", "-B", "-ntp", "-f", str(pom), COPY, f"-DoutputDirectory={target}"]
        done = process.run([*command, "-DincludeScope=runtime"])
        if done.returncode:
            errors = re.findall(r"\[ERROR\S* (.+)", done.stdout) or ["no reason given"]
            # The cause stands last, behind everything that failed because of it.
            reason = ": ".join(errors[0].split(" -> ")[0].split(": ")[-2:])[:300]
            raise MissingError(
                f"Maven could not fetch {self.label} ({reason}); "
                "check the network and Maven's settings, then run `python -m servers fetch`"
            )
        pom.unlink()

    def _pom(self) -> str:
        bill = self.managed_by and _dependency(self.managed_by, "<type>pom</type><scope>import</scope>")
        managed = f"<dependencyManagement><dependencies>{bill}</dependencies></dependencyManagement>" if bill else ""
        wanted = "".join(_dependency(each) for each in self.artifacts)
        return (
            "<project><modelVersion>4.0.0</modelVersion><groupId>pillarbox</groupId>"
            f"<artifactId>servers</artifactId><version>1</version>{managed}"
            f"<dependencies>{wanted}</dependencies></project>"
        )


def java() -> str | None:
    """The program of `$JAVA_HOME`, else that of the PATH."""
    if home := os.environ.get("JAVA_HOME"):
        return shutil.which("java", path=f"{home}/bin")
    return shutil.which("java")


def _dependency(artifact: str, more: str = "") -> str:
    group, name, version = artifact.split(":")
    return (
        f"<dependency><groupId>{group}</groupId><artifactId>{name}</artifactId>"
        f"<version>{version}</version>{more}</dependency>"
    )
