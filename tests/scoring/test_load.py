"""What loading and scoring a model leave alone."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]

CODE = """
import json, sys
import prb_jax as prb
from prb_jax.commands.process import enable_compilation_cache
enable_compilation_cache()
model = prb.load(sys.argv[1])
score = model.reward("Tea or coffee?", "tea", profile=[{"id": "1", "text": "rain"}])
data = [prb.Comparison(id="1", question="?", chosen="tea", rejected="soup")]
result = prb.evaluate(model, data, progress=False)
modules = {name: module.__file__ for name, module in sys.modules.items() if getattr(module, "__file__", None)}
print(json.dumps([score, result.summary["n"], modules]))
"""


def test_loading_and_scoring_import_no_optimiser_and_no_training(folder: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", CODE, str(folder)],
        capture_output=True, text=True, cwd=ROOT, timeout=120, check=True,
    )  # fmt: skip
    score, scored, modules = json.loads(done.stdout.splitlines()[-1])
    assert isinstance(score, float)
    assert scored == 1
    assert {"prb_jax.scoring.load", "prb_jax.models.readouts.open_model"} <= modules.keys()
    assert not [name for name in modules if name.startswith(("orbax", "prb_jax.training"))]
    # flax imports optax for itself; no file of the project that is loaded does.
    loaded = [Path(file) for name, file in modules.items() if name.startswith("prb_jax.")]
    assert not [path for path in loaded if re.search(r"(?m)^\s*(import|from) optax\b", path.read_text())]
