"""Other tools read the configurations that are written for them, by their own code (`make test-tools`)."""

import json
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import yaml

from app.contract.objective import ObjectiveName
from app.planning.tool_configs import Tool, config_for
from app.planning.tool_configs.job import NotExpressible, split_evenly
from tests.harness.tool_jobs import LLAMA, SPLIT, job, words_of

pytestmark = pytest.mark.filterwarnings("ignore")  # those of the tools

OBJECTIVES: tuple[ObjectiveName, ...] = ("sft", "dpo", "kto", "reward", "orpo", "simpo")
METHODS = ("full", "lora", "qlora")


def written(tool: Tool, folder: Path, **changes: Any) -> Path | None:
    """A tool's file; None if the tool cannot train this."""
    try:
        made = config_for(tool, job(**changes))
    except NotExpressible:
        return None
    path = folder / made.file_name
    path.write_text(made.content)
    return path


@pytest.mark.parametrize(("objective", "method"), list(product(OBJECTIVES[:4], METHODS)))
def test_trl_reads_it(tmp_path: Path, objective: ObjectiveName, method: str) -> None:
    trl = pytest.importorskip("trl", reason="make test-tools")
    from trl.scripts.utils import DatasetMixtureConfig

    own = {"sft": "SFTConfig", "dpo": "DPOConfig", "kto": "KTOConfig", "reward": "RewardConfig"}[objective]
    path = written("trl", tmp_path, objective=objective, method=method, precision="fp32")
    kinds = (trl.ScriptArguments, getattr(trl, own), trl.ModelConfig, DatasetMixtureConfig)
    _, read, model, data = trl.TrlParser(kinds).parse_args_and_config(
        ["--config", str(path), "--use_cpu", "true"], fail_with_unknown_args=True
    )
    assert read.per_device_train_batch_size * read.gradient_accumulation_steps * SPLIT.devices == 60
    assert (model.use_peft, model.load_in_4bit) == (method != "full", method == "qlora")
    assert [each.data_files for each in data.datasets] == ["data.jsonl"]


@pytest.mark.parametrize(("objective", "method"), list(product(OBJECTIVES, METHODS)))
def test_axolotl_reads_it(tmp_path: Path, objective: ObjectiveName, method: str) -> None:
    config = pytest.importorskip("axolotl.utils.schemas.config", reason="make test-tools")
    path = written("axolotl", tmp_path, objective=objective, method=method)
    assert path is not None
    content = yaml.safe_load(path.read_text())
    read = config.AxolotlInputConfig(**content)
    assert read.micro_batch_size * read.gradient_accumulation_steps * SPLIT.devices == 60
    fields = config.AxolotlInputConfig.model_fields
    known = {*fields, *(each.alias for each in fields.values() if each.alias)}
    known |= {str(each.validation_alias) for each in fields.values() if each.validation_alias}
    assert set(content) <= known


@pytest.mark.parametrize(("objective", "method"), list(product(OBJECTIVES, METHODS)))
def test_llamafactory_reads_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, objective: ObjectiveName, method: str
) -> None:
    monkeypatch.setenv("DISABLE_VERSION_CHECK", "1")
    parser = pytest.importorskip("llamafactory.hparams.parser", reason="make test-tools")
    path = written("llamafactory", tmp_path, objective=objective, method=method, precision="fp32")
    assert path is not None
    read = parser._parse_train_args(yaml.safe_load(path.read_text()))[2]
    assert read.per_device_train_batch_size * read.gradient_accumulation_steps * SPLIT.devices == 60


@pytest.mark.parametrize("method", ["full", "lora"])
def test_nemo_reads_it(tmp_path: Path, method: str) -> None:
    loader = pytest.importorskip("nemo_automodel.components.config.loader", reason="make test-tools")
    from nemo_automodel.recipes._typed_config import RecipeConfig

    config = loader.load_yaml_config(str(written("nemo", tmp_path, method=method)))
    scheduler = RecipeConfig(config).step_scheduler
    built = scheduler.build([0] * 1000, SPLIT.devices, config.step_scheduler.local_batch_size)
    assert built.grad_acc_steps == SPLIT.steps
    assert scheduler.global_batch_size == 60


def test_kubeflow_reads_it() -> None:
    models = pytest.importorskip("kubeflow_trainer_api.models", reason="make test-tools")
    content = yaml.safe_load(config_for("kubeflow", job()).content)
    read = models.TrainerV1alpha1TrainJob.from_dict(content)
    assert json.loads(read.to_json()) == content


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("model", [LLAMA, "Qwen/Qwen2.5-0.5B", "google/gemma-2-2b"])
def test_torchtune_has_what_is_changed(model: str, method: str) -> None:
    registry = pytest.importorskip("torchtune._recipe_registry", reason="make test-tools")
    from omegaconf import OmegaConf

    made: dict[str, Any] = {"model": model, "method": method, "split": split_evenly(60, 1, 7)}
    try:
        words = words_of(config_for("torchtune", job(**made)).content)
    except NotExpressible:
        pytest.skip("torchtune has no such configuration")
    at = words.index("--config")
    (recipe,) = (each for each in registry.get_all_recipes() if each.name == words[at - 1])
    (named,) = (each for each in recipe.configs if each.name == words[at + 1])
    whole = OmegaConf.load(Path(registry.__file__).parents[1] / "recipes/configs" / named.file_path)
    changes = OmegaConf.from_dotlist(words[at + 2 :])
    merged = OmegaConf.merge(whole, changes)
    assert merged.batch_size * merged.gradient_accumulation_steps == 60
    assert set(OmegaConf.to_container(changes)) <= set(OmegaConf.to_container(whole))
