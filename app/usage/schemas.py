"""Usage on the wire."""

import datetime

from pydantic import Field

from app.contract.base import ResponseModel


class UsageOfDay(ResponseModel):
    key_id: str | None = Field(description="null: jobs that were submitted without a key")
    key_name: str | None = Field(description="null if there is no key, or it no longer exists")
    day: datetime.date = Field(description="In UTC; an attempt counts on the day on which it ends")
    device_hours: float = Field(
        description="The time of the attempts, each multiplied by its number of devices"
    )
    attempts: int


class QuotaResponse(ResponseModel):
    key_id: str
    key_name: str
    device_hours: float = Field(description="The quota: hours on devices in a calendar month (UTC)")
    used_device_hours: float = Field(description="This month, running attempts included")
    renews_on: datetime.date


class UsageResponse(ResponseModel):
    first: datetime.date
    last: datetime.date
    device_hours: float = Field(description="The sum over these days")
    data: list[UsageOfDay] = Field(description="Newest day first")
    quotas: list[QuotaResponse] = Field(description="Of the keys that have one")
