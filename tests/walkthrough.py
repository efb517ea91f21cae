"""Does what a page of the documentation tells its reader to do."""

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

_BLOCK = re.compile(r"^```(shell|python)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_FILE = re.compile(r"# (\w+\.py)\n")


class Ran(NamedTuple):
    command: str
    output: str


def follow(page: Path, folder: Path, *, source: Path | None = None) -> list[Ran]:
    """Writes the page's Python files into a folder and runs its commands there, in the page's order.

    A fenced ``python`` block that begins with a comment naming a file is that file; any other is run. Every line of a
    ``shell`` block is a command that has to succeed; a claim that fails, which is exit code 3, is no failure of the page.

    Args:
        page: The Markdown file.
        folder: Where its reader works.
        source: A source tree to be used in place of the installed one.
    """
    env = {name: value for name, value in os.environ.items() if name not in ("ASSAY_RUNS", "MLFLOW_TRACKING_URI")}
    env["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{env['PATH']}"
    env["COLUMNS"] = "160"
    if source:
        env["PYTHONPATH"] = str(source)
    ran = []
    for kind, body in _BLOCK.findall(page.read_text(encoding="utf-8")):
        if kind == "python" and (name := _FILE.match(body)):
            (folder / name[1]).write_text(body, encoding="utf-8")
            continue
        commands = [[sys.executable, "-c", body]] if kind == "python" else [["bash", "-c", line] for line in body.splitlines()]
        for command in commands:
            done = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True)
            allowed = (0, 3) if "assay run" in command[-1] else (0,)
            assert done.returncode in allowed, f"{command[-1]}\nexited with {done.returncode}\n{done.stdout}\n{done.stderr}"
            ran.append(Ran(command[-1], done.stdout + done.stderr))
    assert ran, f"{page} tells its reader to do nothing"
    return ran
