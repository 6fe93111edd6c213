"""The models for which jobs can be planned, in the native API."""

from app.contract.base import Page
from app.models import base_models
from app.planning.schemas import PlannableModelResponse
from app.web.dependencies import CurrentSettings
from app.web.routers import native_router

router = native_router(tags=["calculators"])


@router.get("/models", summary="Models for which jobs can be planned without contacting the hub")
def list_models(settings: CurrentSettings) -> Page[PlannableModelResponse]:
    """Training a model of the catalogue needs its files: from the models folder, or from the hub."""
    data = [
        PlannableModelResponse(
            id=name, source=source, parameters=architecture.parameters, positions=architecture.positions
        )
        for name, (source, architecture) in base_models.plannable_models(settings).items()
    ]
    return Page(data=data, has_more=False, first_id=data[0].id, last_id=data[-1].id)
