"""Table of open reward models: one row per family, with rules of recognition and the read-out.

A model that fits an existing primitive (:mod:`prb_jax.models.readouts.heads`) needs only one more row here. Rows are
tried in the order of the table; see :func:`prb_jax.models.readouts.open_model.resolve_model`.
"""

from __future__ import annotations

from collections.abc import Mapping

from prb_jax.models.config.decoder import WeightLayout
from prb_jax.models.head import LINEAR, Linear
from prb_jax.models.readouts.gated import Gated
from prb_jax.models.readouts.heads import Mlp, NormedPooled, Pooled, Stack, Steps
from prb_jax.models.readouts.row import ModelRow as ModelRow
from prb_jax.models.readouts.row import RawConfig
from prb_jax.models.vocabulary_heads import Vocabulary
from prb_jax.text.template import TextRules

# End of the last turn and the assistant's header: at its first token the model has seen the whole prompt.
_END_OF_PROMPT = (
    ("llama", (128009, 128006, 78191, 128007, 271)),
    ("gemma2", (107, 108, 106, 2516, 108)),
)
_VALUE_HEAD_FILES = (("value_head.safetensors", ""), ("value_head.bin", ""))
# Five attributes of HelpSteer: helpfulness, correctness, coherence, complexity, verbosity.
_URM_3_WEIGHTS = (0.3, 0.74, 0.46, 0.47, -0.33)
# Template of the model card.
_ULTRA_RM_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}{% if not loop.first %}{{ '\n\n' }}{% endif %}"
    "{{ 'Human' if message['role'] == 'user' else message['role'] | capitalize }}: {{ message['content'] }}{% endfor %}"
)
# Template of RewardBench.
_ULTRA_RM_REWARDBENCH = (
    "{{ bos_token }}{% for message in messages %}"
    "{{ message['role'] | capitalize }}: {{ message['content'] }}{{ '\n\n' }}{% endfor %}{{ eos_token }}"
)
# Example of the card: "<s>[INST] Hello? </s> [/INST] Hi, how can I help you?</s>". The card has no system turn; we
# insert one as Llama 2 does.
_STARLING_7B_TEMPLATE = (
    "{% set system = '' %}{% set turns = messages %}{% if messages[0]['role'] == 'system' %}"
    "{% set system = '<<SYS>>\n' + messages[0]['content'] + '\n<</SYS>>\n\n' %}{% set turns = messages[1:] %}"
    "{% endif %}{% for message in turns %}{% if message['role'] == 'assistant' %}"
    "{{ ' ' + message['content'] + eos_token }}{% else %}{{ bos_token + '[INST] ' }}"
    "{{ (system if loop.first else '') + message['content'] }}"
    "{{ ' ' + eos_token + ' [/INST]' }}{% endif %}{% endfor %}"
)


def _internlm2(raw: RawConfig) -> RawConfig:
    """Convert the configuration of InternLM2, which is Llama with other names and with q, k, v in one matrix."""
    raw = dict(raw)
    raw["attention_bias"] = raw.pop("bias", False)
    scaling = raw.get("rope_scaling") or {}
    if scaling.get("type", scaling.get("rope_type")) == "dynamic":
        # It only affects positions beyond max_position_embeddings, and no conversation is longer.
        raw["rope_scaling"] = None
    return raw


def _qwen2_5_vl(raw: RawConfig) -> RawConfig:
    """Convert the configuration of Qwen 2.5-VL, whose language model is Qwen 2, with or without a "text_config".

    Its rope has three positions per token (time, height, width). For text they are equal, which is plain rope.
    """
    raw = dict(raw)
    text = raw.pop("text_config", None) or {}
    raw |= {name: value for name, value in text.items() if value is not None and name != "architectures"}
    raw.pop("vision_config", None)
    for name in ("rope_scaling", "rope_parameters"):
        rope = {key: value for key, value in (raw.pop(name, None) or {}).items() if key != "mrope_section"}
        for key in ("type", "rope_type"):
            if rope.get(key) == "mrope":
                rope[key] = "default"
        if rope.keys() - {"type", "rope_type"} or {rope.get("type"), rope.get("rope_type")} - {
            None,
            "default",
        }:
            raw[name] = rope
    return raw | {"model_type": "qwen2"}


REGISTRY: tuple[ModelRow, ...] = (
    ModelRow(
        name="nemotron-vocabulary",
        models=("nvidia/Llama-3.1-Nemotron-70B-Reward-HF", "nvidia/Llama-3.3-Nemotron-70B-Reward"),
        head=Vocabulary(tokens=(0,)),
        classes=("LlamaForCausalLM",),
        by_name=True,
        notes=("trained on conversations of up to 4,096 tokens",),
    ),
    ModelRow(
        name="urm-llama-3",
        models=("LxzGordon/URM-LLaMa-3-8B",),
        head=Gated(objectives=Stack("score"), per_objective=2, value="first", weights=_URM_3_WEIGHTS),
        by_name=True,
    ),
    ModelRow(
        name="urm",
        models=("LxzGordon/URM-LLaMa-3.1-8B",),
        head=Gated(
            objectives=Stack("score"), per_objective=2, value="first", gate=Stack("weights.fc", "selu")
        ),
        tensors=("score.weight", "weights.fc.0.weight"),
        notes=("the original computes its gate in float16, here it is float32",),
    ),
    ModelRow(
        name="qrm",
        models=("nicolinho/QRM-Llama3.1-8B", "nicolinho/QRM-Llama3-8B"),
        head=Gated(
            objectives=Stack("regression_layer"),
            per_objective="num_quantiles",
            value="mean",
            transform="reward_transform_matrix",
            gate=Stack("gating.layers"),
            gate_at=_END_OF_PROMPT,
            temperature=10.0,
            temperature_field="gating_temperature",
            scale="gating.logit_scale",
        ),
        tensors=("regression_layer.weight", "gating.logit_scale", "reward_transform_matrix"),
        fields=("num_quantiles",),
    ),
    ModelRow(
        name="armorm",
        models=("RLHFlow/ArmoRM-Llama3-8B-v0.1",),
        head=Gated(
            objectives=Stack("regression_layer"),
            transform="reward_transform_matrix",
            gate=Stack("gating.layers"),
            gate_at=_END_OF_PROMPT,
            temperature=10.0,
            temperature_field="gating_temperature",
            scale="gating.logit_scale",
        ),
        tensors=("regression_layer.weight", "gating.logit_scale", "reward_transform_matrix"),
    ),
    ModelRow(
        name="ldl",
        models=("ShikaiChen/LDL-Reward-Gemma-2-27B-v0.1",),
        head=Gated(
            objectives=Stack("regression_layer.network", "leaky_relu"),
            per_objective=10,
            value="bins",
            gate=Stack("gating_layer.network", "leaky_relu"),
            temperature=1.0,
            temperature_field="temperature",
            softmax_field="softmax",
        ),
        tensors=("regression_layer.network.0.weight", "gating_layer.network.0.weight"),
        layout=WeightLayout(
            side_files=(
                ("regression_layer.pt", "regression_layer."),
                ("gating_layer.pt", "gating_layer."),
            )
        ),
        prefixes=("model.", ""),
    ),
    ModelRow(
        name="inf-orm",
        models=("infly/INF-ORM-Llama3.1-70B",),
        head=Mlp(Stack("score")),
        classes=("INFORMForSequenceClassification",),
        tensors=("score.0.weight", "score.2.weight"),
    ),
    ModelRow(
        name="qwen2-prm",
        models=("Qwen/Qwen2.5-Math-PRM-7B", "Qwen/Qwen2.5-Math-PRM-72B"),
        head=Steps(Stack("score"), marker=151651, marker_text="<extra_0>"),
        classes=("Qwen2ForProcessRewardModel",),
        tensors=("score.0.weight", "score.2.weight"),
        text=TextRules(suffix="<extra_0>", suffix_id=151651),
        notes=(
            "<extra_0> ends each step of a response, and is put after a response that does not end in it",
        ),
    ),
    ModelRow(
        name="qwen2-rm",
        models=("Qwen/Qwen2.5-Math-RM-72B", "Qwen/WorldPM-72B*"),
        head=Mlp(Stack("score")),
        classes=("Qwen2ForRewardModel",),
        tensors=("score.0.weight", "score.2.weight"),
    ),
    ModelRow(
        name="grm-sftreg",
        models=("Ray2333/GRM-*-sftreg",),
        head=Mlp(Stack("v_head.summary"), depth_field="vhead_num_layers"),
        tensors=("v_head.summary.0.weight",),
    ),
    ModelRow(
        name="internlm2",
        models=(
            "internlm/internlm2-1_8b-reward",
            "internlm/internlm2-7b-reward",
            "internlm/internlm2-20b-reward",
        ),
        head=Linear(("v_head.weight",)),
        classes=("InternLM2ForRewardModel",),
        tensors=("v_head.weight", "model.tok_embeddings.weight"),
        layout=WeightLayout(style="internlm2"),
        model_type="llama",
        translate=_internlm2,
        text=TextRules(append="given", append_id=92527),
        append_field="reward_token_id",
    ),
    ModelRow(
        name="starling",
        models=("berkeley-nest/Starling-RM-7B-alpha", "Nexusflow/Starling-RM-34B"),
        head=Linear(("v_head.weight",)),
        tensors=("v_head.weight", "transformer.norm.weight"),
        layout=WeightLayout(ignored=((r"model\..*", "the same weights a second time"),)),
        prefixes=("transformer.",),
        text=TextRules(replaced=(("[INST]", _STARLING_7B_TEMPLATE),)),
        notes=(
            "the 7B model is weights alone: put config.json and the tokenizer of Llama-2-7b-chat-hf beside them; "
            "instead of that tokenizer's chat template the one of the model card is used",
        ),
    ),
    ModelRow(
        name="athene",
        models=("Nexusflow/Athene-RM-8B", "Nexusflow/Athene-RM-70B"),
        head=Linear(("v_head.weight",)),
        classes=("AtheneForSequenceClassification",),
        text=TextRules(append="cls_token", append_id=128003),
    ),
    ModelRow(
        name="ultra-rm",
        models=("openbmb/UltraRM-13b",),
        head=Linear(("regression_head.weight",)),
        classes=("LlamaRewardModel",),
        text=TextRules(template=_ULTRA_RM_TEMPLATE, templates=(("rewardbench", _ULTRA_RM_REWARDBENCH),)),
        notes=(
            "--chat-template rewardbench shows conversations as RewardBench does, which is not the card's form",
        ),
    ),
    ModelRow(
        name="eurus",
        models=("openbmb/Eurus-RM-7b",),
        head=Linear(("regression_head.weight",)),
        classes=("EurusRewardModel",),
    ),
    ModelRow(
        name="skywork-vl",
        models=("Skywork/Skywork-VL-Reward-7B",),
        head=Linear(("v_head.summary.weight",), with_bias=True),
        classes=("Qwen2_5_VLForConditionalGeneration",),
        layout=WeightLayout(
            side_files=_VALUE_HEAD_FILES,
            ignored=((r"(model\.)?visual\..*", "vision tower, not used for text"),),
        ),
        prefixes=("model.language_model.", "language_model.model.", "model."),
        translate=_qwen2_5_vl,
        notes=(
            "text alone is scored: the vision tower is not read, and a comparison with an image is refused",
        ),
    ),
    ModelRow(
        name="value-head",
        models=("exports of TRL and LLaMA-Factory",),
        head=Linear(("v_head.summary.weight",), with_bias=True),
        tensors=("v_head.summary.weight",),
        without=("score.weight",),
        layout=WeightLayout(side_files=_VALUE_HEAD_FILES),
    ),
    ModelRow(
        name="openrlhf",
        models=("OpenRLHF/Llama-3-8b-rm-700k", "OpenRLHF/Llama-3-8b-rm-mixture", "exports of OpenRLHF"),
        head=Linear(("score.weight", "value_head.weight")),
        classes=("LLMForSequenceRegression", "RewardModel"),
    ),
    ModelRow(
        name="openrlhf-prefix",
        models=("exports of OpenRLHF that say value_head_prefix",),
        head=Linear(("score.weight", "value_head.weight")),
        fields=("value_head_prefix",),
    ),
    ModelRow(
        name="deberta-pair",
        models=(
            "OpenAssistant/reward-model-deberta-v3-large",
            "OpenAssistant/reward-model-deberta-v3-large-v2",
            "OpenAssistant/reward-model-deberta-v3-base",
        ),
        head=Pooled(),
        classes=("DebertaV2ForSequenceClassification",),
        notes=("prompt and response are encoded as a pair of texts, without a chat template",),
    ),
    ModelRow(
        name="modernbert-pair",
        models=("ModernBertForSequenceClassification with one label",),
        head=NormedPooled(),
        classes=("ModernBertForSequenceClassification",),
        notes=("prompt and response are encoded as a pair of texts, without a chat template",),
    ),
    ModelRow(
        name="skywork-v2",
        models=("Skywork/Skywork-Reward-V2-*",),
        head=LINEAR,
        notes=("made for conversations without a system turn, of up to 16,384 tokens",),
    ),
    ModelRow(
        name="skywork-v1",
        models=("Skywork/Skywork-Reward-Llama-3.1-8B*", "Skywork/Skywork-Reward-Gemma-2-27B*"),
        head=LINEAR,
    ),
    ModelRow(name="fsfairx", models=("sfairXC/FsfairX-LLaMA3-RM-v0.1",), head=LINEAR),
    ModelRow(name="offset-bias", models=("NCSOFT/Llama-3-OffsetBias-RM-8B",), head=LINEAR),
    ModelRow(
        name="grm-finetuned",
        models=("Ray2333/GRM-*-rewardmodel-ft", "Ray2333/GRM-*-distill"),
        head=LINEAR,
    ),
    ModelRow(
        name="nemotron-classifier",
        models=(
            "nvidia/Qwen-3-Nemotron-32B-Reward",
            "nvidia/Qwen-2.5-Nemotron-32B-Reward",
            "nvidia/Llama-3.3-Nemotron-70B-Reward-Multilingual",
        ),
        head=LINEAR,
        notes=("trained on conversations of up to 8,192 tokens (70B: 4,096)",),
    ),
    ModelRow(
        name="tulu",
        models=("allenai/Llama-3.1-*-RM-RB2", "allenai/Llama-3.1-Tulu-3-8B-RM"),
        head=LINEAR,
        notes=("seeds and epochs are revisions: name one with --revision",),
    ),
    ModelRow(name="linear", models=("any other *ForSequenceClassification",), head=LINEAR),
)

ROWS: Mapping[str, ModelRow] = {row.name: row for row in REGISTRY}
