"""Runs functions of the page's JavaScript files in node, without a browser."""

import json
import shutil
import subprocess

import pytest

from nearpeak.render.html.profile import asset


def run(files, expression, data=None):
    """The value of an expression, with `data` as a name in it, after the files were read."""
    node = shutil.which("node")
    if node is None:
        pytest.skip("node is not installed: the JavaScript files are tested in the browser alone")
    parts = [asset(name) for name in files]
    program = "\n".join(
        [
            '"use strict";',
            *parts,
            "const data = JSON.parse(require('fs').readFileSync(0, 'utf8'));",
            f"process.stdout.write(JSON.stringify({expression}));",
        ]
    )
    ran = subprocess.run([node, "-e", program], input=json.dumps(data), capture_output=True, text=True, timeout=60)
    assert ran.returncode == 0, ran.stderr
    return json.loads(ran.stdout)
