"""What the result file says about where it was made."""

from __future__ import annotations

import json
import re
from datetime import datetime

import torch

import gossamer as gs
from gossamer.evaluation.environment import environment


def test_environment_is_complete_and_jsonable():
    facts = environment()
    assert set(facts) == {
        "gossamer",
        "torch",
        "diffusers",
        "python",
        "platform",
        "cpu",
        "threads",
        "device",
        "commit",
        "date",
    }
    assert json.loads(json.dumps(facts)) == facts
    assert facts["gossamer"] == gs.__version__
    assert facts["torch"] == torch.__version__
    assert facts["device"] == "cpu"
    assert facts["cpu"]
    assert facts["commit"] is None or re.fullmatch("[0-9a-f]{40}", facts["commit"])
    assert datetime.fromisoformat(facts["date"]).utcoffset().total_seconds() == 0
