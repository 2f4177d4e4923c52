"""Tiny random checkpoints with the tensor names and head layouts of open reward models, and their scores.

Bodies are transformers' own; heads are written here with torch, in float64, as their authors describe them.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="the heads are written with torch")
Tensor = torch.Tensor
Tensors = dict[str, Tensor]
Score = Callable[[Tensor, Sequence[int], Tensors], Tensor]
MakeHead = Callable[[torch.Generator], Tensors]

WIDTH = 32
LLAMA_END_OF_PROMPT = (128009, 128006, 78191, 128007, 271)
GEMMA_END_OF_PROMPT = (107, 108, 106, 2516, 108)
STEP = 151651

SIZES: Mapping[str, Any] = {
    "hidden_size": WIDTH,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 512,
    "tie_word_embeddings": False,
}


@dataclass(frozen=True)
class RowCase:
    """One checkpoint of one row of the registry."""

    row: str  # name of the row
    body: str  # transformers' class of the body, without ``Model``
    head: MakeHead  # makes the head's tensors
    score: Score  # the reward of one conversation from its normalised states float64 [T, D], its ids and the head
    config: Mapping[str, Any] = field(default_factory=dict)  # changes to the body's ``config.json``
    # further arguments of the body's configuration class
    options: Mapping[str, Any] = field(default_factory=dict)
    rename: Callable[[str], str] = "model.{}".format  # the name a body's tensor has in the checkpoint
    folder: str = "model"  # what the folder is called, where the row is known by that
    vocab: int = 256  # size of the vocabulary
    marks: tuple[int, ...] = ()  # ids put at the end of the prompt, and where a step ends
    side_files: Mapping[str, str] = field(default_factory=dict)
    """File -> start of the names of tensors that it holds; left out there if it is a whole part."""
    pickled: bool = False  # the weights are in pytorch_model.bin
    twice: str = ""  # what the names of the body's tensors start with where it is in the file a second time
    nested: str = ""  # the field of ``config.json`` that holds the body's, where it is not the whole file


def matrix(generator: torch.Generator, rows: int, columns: int) -> Tensor:
    return torch.randn(rows, columns, generator=generator) / columns**0.5


def vector(generator: torch.Generator, size: int) -> Tensor:
    return 0.5 * torch.randn(size, generator=generator)


def write_case(case: RowCase, root: Path, *, seed: int = 0) -> tuple[Path, Callable[[Sequence[int]], float]]:
    """Writes the checkpoint; returns its folder and the function from ids to the reward."""
    import transformers
    from safetensors.torch import save_file

    generator = torch.Generator().manual_seed(seed)
    config = getattr(transformers, f"{case.body}Config")(
        **SIZES, vocab_size=case.vocab, pad_token_id=0, **case.options
    )
    config._attn_implementation = "eager"
    model = getattr(transformers, f"{case.body}Model")(config).eval()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            noise = torch.randn(weight.shape, generator=generator)
            if "norm" in name:
                weight.copy_(0.3 * noise + (0.0 if "Gemma" in case.body else 1.0))
            elif "embed_tokens" in name:
                weight.copy_(noise / (WIDTH**0.5 if "Gemma" in case.body else 1.0))
            else:
                weight.copy_(noise / weight.shape[-1] ** 0.5)
    head = case.head(generator)
    if "vocabulary" in case.row:
        head["lm_head.weight"] = matrix(generator, case.vocab, WIDTH)

    folder = root / case.folder
    folder.mkdir(parents=True)
    raw = json.loads(config.to_json_string(use_diff=False))
    if case.nested:
        raw = {case.nested: {key: value for key, value in raw.items() if value is not None}}
    raw.update(case.config)
    raw = {key: value for key, value in raw.items() if value is not None}
    (folder / "config.json").write_text(json.dumps(raw))
    tensors = fuse(case, {case.rename(name): value for name, value in model.state_dict().items()})
    main = dict(head)
    for file, start in case.side_files.items():
        names = [name for name in head if name.startswith(start)]
        left_out = start if start.endswith(".") else ""
        part = {name.removeprefix(left_out): main.pop(name) for name in names}
        if file.endswith(".safetensors"):
            save_file(part, folder / file)
        else:
            torch.save(part, folder / file)
    tensors.update({name: value.contiguous() for name, value in main.items()})
    if case.twice:
        tensors.update({f"{case.twice}{name}": value for name, value in model.state_dict().items()})
    if case.pickled:
        torch.save(tensors, folder / "pytorch_model.bin")
    else:
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})

    model, head = model.double(), {name: value.double() for name, value in head.items()}

    def score(ids: Sequence[int]) -> float:
        with torch.inference_mode():
            states = model(input_ids=torch.tensor([list(ids)])).last_hidden_state[0]
            return float(case.score(states, list(ids), head))

    return folder, score


def fuse(case: RowCase, tensors: Tensors) -> Tensors:
    """Of InternLM2: q, k and v of each layer in one matrix, key-value head by key-value head."""
    if case.row != "internlm2":
        return tensors
    kv_heads, size = 2, 8
    for layer in range(2):
        start = f"model.layers.{layer}.attention."
        parts = [tensors.pop(f"{start}{name}_proj.weight") for name in "qkv"]
        parts = [part.reshape(kv_heads, -1, size, WIDTH) for part in parts]
        tensors[f"{start}wqkv.weight"] = torch.cat(parts, dim=1).reshape(-1, WIDTH).contiguous()
    return tensors


_INTERNLM2 = {
    "embed_tokens": "tok_embeddings",
    "self_attn.o_proj": "attention.wo",
    "self_attn.": "attention.",
    "mlp.gate_proj": "feed_forward.w1",
    "mlp.up_proj": "feed_forward.w3",
    "mlp.down_proj": "feed_forward.w2",
    "post_attention_layernorm": "ffn_norm",
    "input_layernorm": "attention_norm",
}


def internlm2_name(name: str) -> str:
    for ours, theirs in _INTERNLM2.items():
        name = name.replace(ours, theirs)
    return f"model.{name}"


def _none(_: torch.Generator) -> Tensors:
    return {}


def linear(key: str, *, bias: bool = False) -> tuple[MakeHead, Score]:
    """A linear head and its reward at the last token."""

    def head(generator: torch.Generator) -> Tensors:
        tensors = {f"{key}.weight": matrix(generator, 1, WIDTH)}
        return tensors | ({f"{key}.bias": vector(generator, 1)} if bias else {})

    def score(states: Tensor, _: Sequence[int], tensors: Tensors) -> Tensor:
        value = tensors[f"{key}.weight"][0] @ states[-1]
        return value + tensors[f"{key}.bias"][0] if bias else value

    return head, score


def layers(names: Sequence[str], sizes: Sequence[int]) -> MakeHead:
    """Linear layers of these names with biases; ``sizes`` has one more entry."""

    def head(generator: torch.Generator) -> Tensors:
        tensors: Tensors = {}
        for name, inputs, outputs in zip(names, sizes, sizes[1:], strict=False):
            tensors[f"{name}.weight"] = matrix(generator, outputs, inputs)
            tensors[f"{name}.bias"] = vector(generator, outputs)
        return tensors

    return head


def run(
    tensors: Tensors, names: Sequence[str], x: Tensor, activation: Callable[[Tensor], Tensor] = torch.relu
) -> Tensor:
    for number, name in enumerate(names):
        x = tensors[f"{name}.weight"] @ x + tensors[f"{name}.bias"]
        if number + 1 < len(names):
            x = activation(x)
    return x


def mlp(names: Sequence[str], sizes: Sequence[int]) -> tuple[MakeHead, Score]:
    return layers(names, sizes), lambda states, _, tensors: run(tensors, names, states[-1])[0]


def gated(
    pattern: tuple[int, ...],
    quantiles: int,
    temperature: float,
    gate_head: MakeHead,
    gate: Callable[[Tensors, Tensor], Tensor],
) -> tuple[MakeHead, Score]:
    """Nineteen objectives, means of quantiles, corrected by a matrix, mixed by a gate that has read the prompt."""

    def head(generator: torch.Generator) -> Tensors:
        return {
            "regression_layer.weight": matrix(generator, 19 * quantiles, WIDTH),
            "reward_transform_matrix": torch.eye(19) - 0.2 * matrix(generator, 19, 19),
            "gating.logit_scale": torch.tensor([1.3]),
            **gate_head(generator),
        }

    def score(states: Tensor, ids: Sequence[int], tensors: Tensors) -> Tensor:
        rewards = (tensors["regression_layer.weight"] @ states[-1]).reshape(19, quantiles).mean(1)
        end = max(i for i in range(len(ids)) if tuple(ids[i : i + len(pattern)]) == pattern)
        weights = torch.softmax(gate(tensors, states[end]) / temperature, 0) * tensors["gating.logit_scale"]
        return (weights * (rewards @ tensors["reward_transform_matrix"])).sum()

    return head, score


def armorm(pattern: tuple[int, ...]) -> tuple[MakeHead, Score]:
    names = [f"gating.layers.{number}" for number in range(4)]
    gate_head = layers(names, (WIDTH, 24, 24, 24, 19))
    return gated(pattern, 1, 10.0, gate_head, lambda tensors, x: run(tensors, names, x))


def qrm(pattern: tuple[int, ...], quantiles: int, temperature: float) -> tuple[MakeHead, Score]:
    """The gate has batch norms."""
    hidden = {0: 2, 3: 5, 6: 8}  # places of linear layers, and of the norms behind them
    parts = ("running_mean", "running_var", "weight", "bias")

    def gate_head(generator: torch.Generator) -> Tensors:
        tensors = layers(["gating.layers.9"], (24, 19))(generator)
        for place, norm in hidden.items():
            tensors[f"gating.layers.{place}.weight"] = matrix(generator, 24, 24 if place else WIDTH)
            tensors |= {f"gating.layers.{norm}.{part}": vector(generator, 24) for part in parts}
            tensors[f"gating.layers.{norm}.weight"] += 1
            tensors[f"gating.layers.{norm}.running_var"] **= 2
            tensors[f"gating.layers.{norm}.running_var"] += 0.1
            tensors[f"gating.layers.{norm}.num_batches_tracked"] = torch.tensor(7)
        return tensors

    def gate(tensors: Tensors, x: Tensor) -> Tensor:
        for place, norm in hidden.items():
            x = torch.relu(tensors[f"gating.layers.{place}.weight"] @ x)
            norms = (tensors[f"gating.layers.{norm}.{part}"] for part in parts)
            x = torch.nn.functional.batch_norm(x[None], *norms)[0]
        return run(tensors, ["gating.layers.9"], x)

    return gated(pattern, quantiles, temperature, gate_head, gate)


def urm(weights: Sequence[float] | None = None) -> tuple[MakeHead, Score]:
    """Means of normal distributions, mixed by a gate or by fixed weights."""
    names = ["weights.fc.0", "weights.fc.2", "weights.fc.4"]
    gate = layers(names, (WIDTH, WIDTH, WIDTH, 5)) if weights is None else _none

    def score(states: Tensor, _: Sequence[int], tensors: Tensors) -> Tensor:
        means = (tensors["score.weight"] @ states[-1])[0::2]
        if weights is not None:
            return means @ torch.tensor(weights, dtype=torch.float64)
        return means @ run(tensors, names, states[-1], torch.nn.functional.selu)

    return lambda generator: {"score.weight": matrix(generator, 10, WIDTH), **gate(generator)}, score


def ldl(softmax: bool) -> tuple[MakeHead, Score]:
    """Twenty-two objectives of ten bins each."""
    values = [f"regression_layer.network.{number}" for number in (0, 2, 4)]
    gates = [f"gating_layer.network.{number}" for number in (0, 3, 6)]
    leaky = torch.nn.functional.leaky_relu

    def head(generator: torch.Generator) -> Tensors:
        return layers(values, (WIDTH, 20, 20, 220))(generator) | layers(gates, (WIDTH, 20, 20, 22))(generator)

    def score(states: Tensor, _: Sequence[int], tensors: Tensors) -> Tensor:
        bins = torch.softmax(run(tensors, values, states[-1], leaky).reshape(22, 10), dim=1)
        gate = run(tensors, gates, states[-1], leaky)
        gate = torch.softmax(gate / 2.0, 0) if softmax else gate
        return (gate @ bins) @ torch.linspace(0, 1, 10, dtype=torch.float64)

    return head, score


TOGETHER: Mapping[str, Callable[[Tensor], Tensor]] = {
    "product": lambda steps: steps.prod(),
    "min": lambda steps: steps.min(),
    "mean": lambda steps: steps.mean(),
    "last": lambda steps: steps[-1],
}


def beside_a_vision_tower(prefix: str) -> tuple[MakeHead, Score]:
    """A value head, and some tensors of a tower for images that text never passes."""
    head, score = linear("v_head.summary", bias=True)

    def tensors(generator: torch.Generator) -> Tensors:
        tower = {f"{prefix}.blocks.0.norm1.weight": vector(generator, 24)}
        tower[f"{prefix}.merger.mlp.2.weight"] = matrix(generator, WIDTH, 24)
        return head(generator) | tower

    return tensors, score


def steps(together: str = "product") -> tuple[MakeHead, Score]:
    names = ["score.0", "score.2"]
    make = layers(names, (WIDTH, WIDTH, 2))

    def head(generator: torch.Generator) -> Tensors:
        return {name: 0.5 * value for name, value in make(generator).items()}

    def score(states: Tensor, ids: Sequence[int], tensors: Tensors) -> Tensor:
        logits = [run(tensors, names, states[i]) for i, token in enumerate(ids) if token == STEP]
        return TOGETHER[together](torch.softmax(torch.stack(logits), 1)[:, 1])

    return head, score


def row_zero(states: Tensor, _: Sequence[int], tensors: Tensors) -> Tensor:
    return tensors["lm_head.weight"][0] @ states[-1]


def yes_or_no(states: Tensor, _: Sequence[int], tensors: Tensors) -> Tensor:
    return torch.softmax(tensors["lm_head.weight"][[17, 4]] @ states[-1], 0)[0]


def classes(*names: str, remote: str | None = None, **fields: Any) -> dict[str, Any]:
    auto_map = {"AutoModelForSequenceClassification": f"modeling_custom.{remote}"} if remote else None
    return {"architectures": list(names) or None, "auto_map": auto_map, **fields}


ONE_LABEL = {"id2label": {"0": "LABEL_0"}, "label2id": {"LABEL_0": 0}}
_STANDARD = linear("score")
_REGRESSION = linear("regression_head")
_V_HEAD = linear("v_head")
_MLP = mlp(("score.0", "score.2"), (WIDTH, WIDTH, 1))
_MROPE = {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [1, 1, 2]}}
_LDL_FILES = {"regression_layer.pt": "regression_layer.", "gating_layer.pt": "gating_layer."}
_LLAMA = {"vocab": 128_300, "marks": LLAMA_END_OF_PROMPT}


CASES: tuple[RowCase, ...] = (
    RowCase(
        "nemotron-vocabulary", "Llama", _none, row_zero,
        classes("LlamaForCausalLM"), folder="Llama-3.1-Nemotron-70B-Reward-HF",
    ),
    RowCase("vocabulary:17,4", "Qwen2", _none, yes_or_no, classes("Qwen2ForCausalLM")),
    RowCase("urm-llama-3", "Llama", *urm([0.3, 0.74, 0.46, 0.47, -0.33]), classes(
        "LlamaForSequenceClassification", num_labels=10), folder="URM-LLaMa-3-8B"),
    RowCase("urm", "Llama", *urm(), classes(
        "LlamaForSequenceClassificationWithNormal_Weights", num_labels=10,
        remote="LlamaForSequenceClassificationWithNormal_Weights")),
    RowCase("armorm", "Llama", *armorm(LLAMA_END_OF_PROMPT), classes(
        "LlamaForRewardModelWithGating", num_labels=19, num_objectives=19), **_LLAMA),
    RowCase("qrm", "Llama", *qrm(LLAMA_END_OF_PROMPT, 5, 10.0), classes(
        "LlamaForRewardModelWithGating", num_quantiles=5, num_objectives=19), **_LLAMA),
    RowCase("qrm", "Gemma2", *qrm(GEMMA_END_OF_PROMPT, 3, 4.0), classes(
        "Gemma2ForRewardModelWithGating", num_quantiles=3, gating_temperature=4.0),
        vocab=2600, marks=GEMMA_END_OF_PROMPT),
    RowCase("ldl", "Gemma2", *ldl(False), classes("LDLRewardModel27B", num_objectives=220),
            side_files=_LDL_FILES, rename=str),
    RowCase("ldl", "Gemma2", *ldl(True), classes("LDLRewardModel27B", softmax=True, temperature=2.0),
            side_files=_LDL_FILES),
    RowCase("inf-orm", "Llama", *_MLP, classes("INFORMForSequenceClassification")),
    RowCase("qwen2-prm", "Qwen2", *steps(), classes("Qwen2ForProcessRewardModel", num_labels=2),
            vocab=151_700, marks=(STEP,)),
    RowCase("qwen2-rm", "Qwen2", *_MLP, classes("Qwen2ForRewardModel", remote="Qwen2ForRewardModel")),
    RowCase("grm-sftreg", "Llama", *mlp(("v_head.summary.0", "v_head.summary.2"), (WIDTH, 40, 1)), classes(
        "GRewardModel", vhead_layer_type="mlp", vhead_num_layers=1, vhead_num_neurons=40)),
    RowCase("grm-sftreg", "Gemma", *mlp(
        [f"v_head.summary.{n}" for n in (0, 2, 4)], (WIDTH, 40, 40, 1)), classes("GRewardModel")),
    RowCase("internlm2", "Llama", *_V_HEAD, classes(
        "InternLM2ForRewardModel", remote="InternLM2ForRewardModel", model_type="internlm2", bias=False,
        attention_bias=None, reward_token_id=92527, rope_parameters=None, rope_theta=1_000_000.0,
        rope_scaling={"type": "dynamic", "factor": 2.0}), rename=internlm2_name,
        options={"rope_parameters": {"rope_type": "default", "rope_theta": 1_000_000.0}}),
    RowCase("starling", "Llama", *_V_HEAD, classes("LlamaForSequenceClassification"), rename="transformer.{}".format),
    RowCase("starling", "Llama", *_V_HEAD, classes("LlamaForCausalLM"),
            rename="transformer.{}".format, pickled=True, twice="model.model."),
    RowCase("athene", "Llama", *_V_HEAD, classes("AtheneForSequenceClassification")),
    RowCase("ultra-rm", "Llama", *_REGRESSION, classes("LlamaRewardModel"), pickled=True),
    RowCase("eurus", "Mistral", *_REGRESSION, classes("EurusRewardModel", remote="EurusRewardModel")),
    RowCase("value-head", "Qwen2", *linear("v_head.summary", bias=True), classes("Qwen2ForCausalLM"),
            side_files={"value_head.safetensors": "v_head"}),
    RowCase("value-head", "Mistral", *linear("v_head.summary", bias=True), classes("MistralForCausalLM"),
            side_files={"value_head.bin": "v_head"}),
    RowCase("skywork-vl", "Qwen2_5_VLText", *beside_a_vision_tower("visual"), classes(
        "Qwen2_5_VLForConditionalGeneration", model_type="qwen2_5_vl", vision_config={"depth": 1}, rope_theta=1e6,
        rope_parameters=None, rope_scaling={"type": "mrope", "mrope_section": [1, 1, 2]},
        image_token_id=251, video_token_id=252, vision_start_token_id=253, vision_end_token_id=254),
            options=_MROPE, side_files={"value_head.safetensors": "v_head"}),
    RowCase("skywork-vl", "Qwen2_5_VLText", *beside_a_vision_tower("model.visual"), classes(
        "Qwen2_5_VLForConditionalGeneration", model_type="qwen2_5_vl", vision_config={"depth": 1},
        image_token_id=251, video_token_id=252), rename="model.language_model.{}".format,
            options=_MROPE, nested="text_config", side_files={"value_head.safetensors": "v_head"}),
    RowCase("openrlhf", "Llama", *linear("value_head"), classes("LLMForSequenceRegression")),
    RowCase("openrlhf-prefix", "Llama", *_STANDARD, classes(
        "LlamaForSequenceClassification", value_head_prefix="score", mean=0.5, std=2.0)),
    *(
        RowCase(
            row, body, *_STANDARD, classes(f"{body}ForSequenceClassification", **ONE_LABEL),
            folder=folder, pickled=row == "tulu",
        )
        for row, body, folder in (
            ("skywork-v2", "Llama", "Skywork-Reward-V2-Llama-3.1-8B"),
            ("skywork-v2", "Qwen3", "Skywork-Reward-V2-Qwen3-8B"),
            ("skywork-v1", "Gemma2", "Skywork-Reward-Gemma-2-27B-v0.2"),
            ("skywork-v1", "Llama", "Skywork-Reward-Llama-3.1-8B"),
            ("fsfairx", "Llama", "FsfairX-LLaMA3-RM-v0.1"),
            ("offset-bias", "Llama", "Llama-3-OffsetBias-RM-8B"),
            ("grm-finetuned", "Gemma2", "GRM-gemma2-2B-rewardmodel-ft"),
            ("nemotron-classifier", "Qwen3", "Qwen-3-Nemotron-32B-Reward"),
            ("tulu", "Llama", "Llama-3.1-8B-Instruct-RM-RB2"),
            ("linear", "Mistral", "model"),
        )
    ),
)  # fmt: skip


def sequences(case: RowCase, *, seed: int) -> list[list[int]]:
    """Three conversations of one comparison; in the first of two kinds the prompt's end is shared."""
    rng = np.random.default_rng(seed)

    def ids(count: int) -> list[int]:
        return [int(x) for x in rng.integers(3, min(case.vocab, 250), count)]

    shared = ids(20)
    if case.row == "qwen2-prm":
        shared[-4] = STEP
        return [[*shared, 3 + k, *ids(4), STEP, *ids(3), STEP, *ids(k)] for k in range(3)]
    if case.marks:
        # An earlier turn's end in the middle; of odd seeds the conversations part before the last one.
        shared[3 : 3 + len(case.marks)] = case.marks
        if seed % 2:
            return [[*shared, 3 + k, *case.marks, *ids(4 + k)] for k in range(3)]
        return [[*shared, *case.marks, 3 + k, *ids(5 + k)] for k in range(3)]
    return [[*shared, 3 + k, *ids(6 + k)] for k in range(3)]
