"""Datasets as the trainer will see them."""

from typing import Annotated

from anyio import to_thread
from fastapi import Path, Query, Request

from app.contract.model_reference import StartingModel
from app.contract.preview import DatasetPreview, PreviewSpec
from app.contract.spec import DataSpec, Overlength
from app.datasets import files, previews
from app.models import starting_models
from app.storage.waits import WaitLimiter
from app.submissions.build_spec import Data, max_length_for
from app.web.dependencies import CurrentDatabase, CurrentSettings
from app.web.routers import native_router

router = native_router("/datasets", tags=["training"])

_TIMEOUT_SECONDS = 50.0


@router.get("/{file_id}/preview", summary="A file as the trainer will see it, token by token")
async def preview(
    request: Request,
    database: CurrentDatabase,
    settings: CurrentSettings,
    file_id: Annotated[str, Path(max_length=100, description="file-…")],
    model_name: Annotated[StartingModel, Query(description="The model whose tokenizer reads the file")],
    max_length: Annotated[int | None, Query(ge=2, description="In tokens; default: that of a job")] = None,
    overlength: Annotated[
        Overlength | None, Query(description="How to treat longer examples; default: as a job does")
    ] = None,
    limit: Annotated[int, Query(ge=1, le=20, description="Samples to show")] = 3,
) -> DatasetPreview:
    """A worker tokenizes the file. From a large file, it reads a thousand evenly spread examples and the
    longest lines."""

    def checked() -> PreviewSpec:
        with database.connecting() as connection:
            found = Data(*files.read_row(connection, database.viewer.owner, file_id, field="file_id"))
        model, _ = starting_models.find_model(model_name, database, settings)
        data = DataSpec(
            file_id=found.file_id,
            sha256=found.sha256,
            format=found.format,
            examples=found.examples,
            max_length=max_length_for(max_length, model, field="max_length"),
            overlength=overlength or found.overlength(),
            packing=False,
            validation=None,
            classes=tuple(found.classes or ()),
        )
        return PreviewSpec(model=model, data=data, shown=limit)

    waits: WaitLimiter = request.app.state.waits
    with waits.place(request.state.caller.key_id):
        order = await to_thread.run_sync(checked)
        return await previews.ask(database, order, _TIMEOUT_SECONDS, request.is_disconnected)
