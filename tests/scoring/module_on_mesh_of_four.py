"""Rewards of plain sequences on four devices, printed: `python -m tests.scoring.module_on_mesh_of_four PART FOLDER`."""

import sys

import jax

if __name__ == "__main__":
    jax.config.update("jax_num_cpu_devices", 4)

    import jax.numpy as jnp
    import numpy as np
    from flax import nnx

    import prb_jax as prb
    from tests.scoring.records import ragged

    part, folder = sys.argv[1:]
    model = prb.load(folder, mesh="fsdp=2,tensor=2", dtype="float32")
    module = model.module
    assert module.layers.q.sharding.spec == jax.sharding.PartitionSpec(
        None, ("fsdp", "sequence"), ("tensor",)
    )
    tokens, lengths = ragged(5, 40, vocabulary=200)
    if part == "mesh":
        rewards = nnx.jit(lambda module: module.score_tokens(tokens, lengths))(module)
    else:
        from tunix.rl.inference.inference_worker import InferenceWorker

        # Prompts are padded on the left, responses on the right.
        prompts, responses = np.zeros((5, 20), np.int32), np.zeros((5, 40), np.int32)
        for row, length in enumerate(lengths):
            begin = min(length, 20)
            prompts[row, 20 - begin :] = tokens[row, :begin]
            responses[row, : length - begin] = tokens[row, begin:length]
        with jax.set_mesh(model.mesh):
            scores = InferenceWorker({"reward": module}).get_rewards(
                jnp.asarray(prompts), jnp.asarray(responses), pad_id=0, eos_id=2
            )
        last = 20 + np.maximum(lengths - 20, 0) - 1
        rewards = np.asarray(scores)[np.arange(5), last]
    print(*np.asarray(rewards).tolist())
