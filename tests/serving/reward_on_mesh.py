"""Rewards on the devices of a learner's mesh: `python -m tests.serving.reward_on_mesh MODEL OUT`."""

from __future__ import annotations

import json
import pickle
import sys
from pathlib import Path

import jax

import prb_jax as prb
from prb_jax.platform.meshes import make_mesh
from tests.serving.test_reward_fn import ANSWERS, POSTS, QUESTION


def main(name: str, out: str) -> None:
    learner = jax.make_mesh((2, 2), ("fsdp", "tp"))
    call = {"prompts": [QUESTION] * 3, "completions": ANSWERS, "profile": [POSTS] * 3}
    by_name = prb.reward_fn(name, mesh=learner, batch_tokens=512)
    model = prb.load(name, mesh=learner)
    with jax.set_mesh(learner):
        in_use = by_name(**call)
    found = {
        "by name": by_name(**call),
        "loaded": prb.reward_fn(model, mesh=learner, batch_tokens=512)(**call),
        "in use": in_use,
        "devices": len(model.params["embed"].sharding.device_set),
        "elsewhere": "",
        "pickled": "",
    }
    try:
        prb.reward_fn(prb.load(name, mesh=make_mesh(devices=jax.devices()[:1])), mesh=learner)
    except prb.RunError as error:
        found["elsewhere"] = str(error)
    try:
        pickle.dumps(by_name)
    except TypeError as error:
        found["pickled"] = str(error)
    Path(out).write_text(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
