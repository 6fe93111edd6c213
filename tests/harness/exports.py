"""Tasks to export the models that runs have trained."""

from pathlib import Path

from app.contract.export import ExportFormat, ExportOrder, ExportType
from app.contract.model_fingerprint import fingerprint_of_files
from app.contract.model_reference import ModelLayer
from workers.exports.protocol import ExportTask
from workers.run_directory import RunDirectory


def task_of(
    run: RunDirectory, folder: Path, form: ExportFormat, type_: ExportType | None = None
) -> ExportTask:
    """The task to export the model of a run, into a folder."""
    assignment = run.assignment()
    lora, base = assignment.spec.method.lora, assignment.spec.model
    scores = assignment.spec.scores
    if lora is None:
        changes = {"name": "ft:x", "source": "job", "job_id": "ftjob-1", "scores": scores}
    else:
        print_of = fingerprint_of_files(run.model)
        layer = ModelLayer(name="ft:x", job_id="ftjob-1", folder="model", lora=lora, fingerprint=print_of)
        changes = {"name": "ft:x", "base": base.name, "layers": (layer,), "scores": scores}
    order = ExportOrder(
        model=base.model_copy(update=changes),
        quantised_base=False,
        name="ft:x",
        format=form,
        type=type_,
        data=assignment.spec.data,
        data_file="file-1",
        seed=assignment.spec.seed,
    )
    temporary, target = folder / "temporary", folder / "export"
    temporary.mkdir(parents=True)
    target.mkdir()
    return ExportTask(
        order=order,
        path=str(run.model) if lora is None else assignment.model_path,
        layer_paths=() if lora is None else (str(run.model),),
        data=assignment.data_file,
        folder=str(target),
        temporary=str(temporary),
        hidden=None,
        converter=None,
    )
