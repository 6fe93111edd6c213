"""The families of causal language models: the `model_type`s that transformers' AutoModelForCausalLM builds,
and those of AutoModelForImageTextToText whose language model can be trained.

The service does not import transformers, so they are listed here; a test compares the list with the installed
transformers. A family that is not listed is accepted if its config names a class that is a causal language
model, since a worker may have a newer transformers.
"""

from collections.abc import Mapping
from typing import Any

FAMILIES = frozenset(
    """ afmoe apertus arcee aria_text axk1 axk2 bailing_hybrid bamba bart beam bert bert-generation big_bird
    bigbird_pegasus biogpt bitnet blenderbot blenderbot-small bloom blt camembert codegen cohere cohere2
    cohere2_moe cohere_compass_text cpmant ctrl cwm data2vec-text dbrx deepseek_v2 deepseek_v3 deepseek_v32
    deepseek_v4 diffllama doge dots1 dots3_note dots3_note_text electra emu3 ernie ernie4_5 ernie4_5_moe
    exaone4 exaone_moe falcon falcon_h1 falcon_mamba flex_olmo flint fuyu gemma gemma2 gemma3 gemma3_text
    gemma3n gemma3n_text gemma4 gemma4_assistant gemma4_text gemma4_unified gemma4_unified_assistant
    gemma4_unified_text git glm glm4 glm4_moe glm4_moe_lite glm_moe_dsa got_ocr2 gpt-sw3 gpt2 gpt_bigcode
    gpt_neo gpt_neox gpt_neox_japanese gpt_oss gptj granite granite_swa granitemoe granitemoe_swa
    granitemoehybrid granitemoeshared helium hrm_text hunyuan_v1_dense hunyuan_v1_moe hy_v3 hy_v4 hyperclovax
    inkling2_text inkling_text internlm3 iquestcoder jais2 jamba jetmoe kimi_linear kolibri1 laguna lfm2
    lfm2_moe lfm3 llama llama4 llama4_text longcat_flash mamba mamba2 marian mbart megatron-bert mellum
    mimo_v2_flash minicpm3 minimax minimax_m2 minimax_m3_vl_text ministral ministral3 mistral mixtral mllama
    modernbert-decoder moshi moss_transcribe_diarize mpt musicgen musicgen_melody mvp nanochat nemotron
    nemotron_h olmo olmo2 olmo3 olmo_hybrid olmoe openai-gpt opt pegasus persimmon phi phi3 phi4_multimodal
    phimoe plbart prophetnet qwen2 qwen2_moe qwen3 qwen3_5 qwen3_5_moe qwen3_5_moe_text qwen3_5_text qwen3_moe
    qwen3_next qwen4_exp qwen4_exp_text recurrent_gemma reformer rembert roberta roberta-prelayernorm roc_bert
    roformer rwkv seed_oss smollm3 solar_open stablelm starcoder2 trocr vaultgemma whisper xglm xlm
    xlm-roberta xlm-roberta-xl xlnet xlstm xmod youtu zamba zamba2 zaya """.split()  # noqa: SIM905
)

MULTIMODAL = frozenset(
    """
    aria aya_vision cohere2_vision cosmos3_omni deepseek_vl deepseek_vl_hybrid exaone4_5 glm46v
    glm4v glm4v_moe glm_ocr hyperclovax_vision_v2 idefics2 idefics3 internvl janus lfm2_vl lfm3_vl
    lighton_ocr llava llava_next llava_next_video llava_onevision minicpm_ocr minicpmv4_6
    minicpmv4_7 minimax_m3_vl mistral3 muse_glimmer ovis2 pp_chart2table qianfan_ocr qwen2_5_vl
    qwen2_vl qwen3_omni_moe_thinker qwen3_vl qwen3_vl_moe smolvlm step3p7 unlimited_ocr
    video_llama_3 video_llava vipllava
    """.split()  # noqa: SIM905
)
"""Families with towers for images, which AutoModelForImageTextToText builds, and whose language model
Accrue has been tested to train on text alone (tests/training/test_any_family.py trains some of them)."""

_ENCODERS = frozenset(
    """
    bert bert-generation big_bird camembert data2vec-text electra ernie megatron-bert rembert roberta
    roberta-prelayernorm roc_bert roformer xlm-roberta xlm-roberta-xl xmod
    """.split()  # noqa: SIM905
)
"""Families whose tokens attend in both directions unless the config has `is_decoder: true`."""

OWN_LOGITS = frozenset(
    """
    bert big_bird camembert data2vec-text electra ernie inkling_text megatron-bert modernbert-decoder rembert
    roberta roberta-prelayernorm roc_bert roformer xlm-roberta xlm-roberta-xl
    """.split()  # noqa: SIM905
)
"""Families whose logits are not simply those of their output head, so that training computes all logits at
once (head_check.check_head finds out; `make accuracy` compares this list with what it found)."""

WITHOUT_SDPA = frozenset(
    """
    bigbird_pegasus bloom codegen cpmant deepseek_v4 flint gemma2 git got_ocr2 gpt_neo gpt_neox_japanese
    gpt_oss gptj granite_swa granitemoe_swa hy_v4 inkling2_text megatron-bert mimo_v2_flash mpt mvp openai-gpt
    pp_chart2table prophetnet rembert roformer trocr vaultgemma xglm xlm xlnet
    """.split()  # noqa: SIM905
)
"""Families without sdpa attention: unless flash attention is requested, they use eager attention, which keeps
a score for each pair of positions."""

NO_TEXT_MODELS = frozenset(
    """
    audioflamingo3 blip_text_model clvp csm csm_depth_decoder_model fun_asr_nano glm_image glmasr
    gradium_phonon_tts granite_speech granite_speech_plus higgs_audio_v2 kyutai_speech_to_text musicflamingo
    pocket_tts qwen2_5_omni_talker qwen2_audio qwen3_asr vibevoice vibevoice_asr voxtral voxtral_realtime
    """.split()  # noqa: SIM905
)
"""Families whose classes look like those of language models, and which none of transformers' classes for text
generation builds: most of them are for speech."""

_CAUSAL_CLASSES = ("ForCausalLM", "LMHeadModel", "ForConditionalGeneration")


def why_not_causal(config: Mapping[str, Any]) -> str | None:
    """Why a config.json is not one of a causal language model; None if it is, as far as its family tells."""
    family = config.get("model_type")
    if not isinstance(family, str):
        return "config.json has no model_type"
    if family in _ENCODERS and config.get("is_decoder") is not True:
        return (
            f"a {family} model is an encoder: each token sees those after it, so it cannot learn to predict "
            "them. Choose a causal language model"
        )
    if family in FAMILIES | MULTIMODAL:
        return None
    if family in NO_TEXT_MODELS:
        return (
            f"transformers builds no model of the family {family} that learns text alone. Choose a model "
            "that generates text, such as Llama, Qwen or Gemma"
        )
    if config.get("auto_map"):
        return (
            f"model_type {family[:50]!r} needs code that comes with the model, and such code is never run. "
            "Choose a model that transformers itself can build"
        )
    classes = config.get("architectures")
    named = [each for each in classes if isinstance(each, str)] if isinstance(classes, list) else []
    if any(each.endswith(_CAUSAL_CLASSES) for each in named) and not config.get("is_encoder_decoder"):
        return None
    return (
        f"model_type {family[:50]!r} is not a causal language model that transformers can build. Choose a "
        "model that generates text, such as Llama, Qwen or Gemma"
    )
