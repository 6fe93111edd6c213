"""What routes ask for: settings, and a session that is committed before the answer goes out."""

from collections.abc import Iterator
from typing import Annotated

from fastapi import Depends, Query, Request
from sqlalchemy.orm import Session

from app.database import Database
from app.settings import Settings


def _settings(request: Request) -> Settings:
    settings: Settings = request.app.state.settings
    return settings


def _database(request: Request) -> Database:
    database: Database = request.app.state.database
    return database


def _reading(database: Annotated[Database, Depends(_database)]) -> Iterator[Session]:
    with database.reading() as session:
        yield session


def _writing(database: Annotated[Database, Depends(_database)]) -> Iterator[Session]:
    with database.writing() as session:
        yield session


CurrentSettings = Annotated[Settings, Depends(_settings)]
CurrentDatabase = Annotated[Database, Depends(_database)]
Reading = Annotated[Session, Depends(_reading, scope="function")]
Writing = Annotated[Session, Depends(_writing, scope="function")]
Limit = Annotated[int, Query(ge=1, le=100, description="At most so many")]
After = Annotated[str | None, Query(max_length=100, description="The last id of the page before")]
