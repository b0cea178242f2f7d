"""The page about Django, followed to the letter in an empty folder.

The rule: a Python block begins with the name of the file that it is, or that it is added to. The lines of `sh` blocks
are typed in their order.
"""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

PAGE = Path(__file__).parents[2] / "docs" / "howto" / "django.md"
BLOCK = re.compile(r"^```(sh|python)\n(.*?)^```", re.MULTILINE | re.DOTALL)
FILE = re.compile(r"# ([\w/]+\.py)(, at the end)?\n")

MYPY = """
[mypy]
strict = true
plugins = mypy_django_plugin.main
[mypy.plugins.django-stubs]
django_settings_module = shop.settings
"""


def write(text: str, folder: Path) -> None:
    place = FILE.match(text)
    assert place is not None, f"a block names no file: {text[:60]}"
    with (folder / place[1]).open("a" if place[2] else "w") as file:
        file.write(text)


def type_(line: str, folder: Path) -> str:
    if line.startswith("pip install "):
        return ""  # it is installed
    others = {name: value for name, value in os.environ.items() if not name.startswith(("PILLARBOX_", "DJANGO_"))}
    path = f"{Path(sys.executable).parent}{os.pathsep}{others['PATH']}"
    ended = subprocess.run(
        line,
        shell=True,
        cwd=folder,
        env={**others, "PATH": path, "PYTHONPATH": str(folder)},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert ended.returncode == 0, f"{line}\n{ended.stdout}{ended.stderr}"
    return ended.stdout + ended.stderr


@pytest.mark.timeout(240)
def test_the_project_works_at_the_first_try(tmp_path: Path) -> None:
    said: dict[str, str] = {}
    for kind, text in BLOCK.findall(PAGE.read_text()):
        if kind == "python":
            write(text, tmp_path)
        else:
            said |= {line: type_(line, tmp_path) for line in text.splitlines()}
    assert "mail about a lamp" in said["python manage.py pillarbox relay --drain"]
    assert re.search(r"^default +ordered +0 ", said["python manage.py pillarbox status"], re.MULTILINE)
    assert "Ran 3 tests" in said["python manage.py test"]
    (tmp_path / "mypy.ini").write_text(MYPY)
    assert "no issues" in type_(f"{sys.executable} -m mypy orders shop/urls.py", tmp_path)
