"""What pyproject.toml cannot say: the migrations of alembic/ travel within the package `app`.

Beside it they would be in the way of the library of the same name.
"""

from setuptools import find_namespace_packages, setup

setup(
    packages=[
        *find_namespace_packages(include=["app", "app.*", "workers", "workers.*"]),
        "app.alembic",
        "app.alembic.versions",
    ],
    package_dir={"app.alembic": "alembic", "app.alembic.versions": "alembic/versions"},
    package_data={"app.alembic": ["script.py.mako"]},
)
