"""The migrations build exactly the schema that the code uses, also from an installed copy of the package."""

import re
import shutil
import subprocess
import sys
import tomllib
from collections import Counter
from pathlib import Path

from alembic import command
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext
from alembic.script import ScriptDirectory
from sqlalchemy import inspect
from sqlalchemy.dialects import postgresql
from sqlalchemy.schema import CreateIndex, CreateTable

from graphstore.store import schema
from graphstore.store.archive import alembic_config, migrate
from graphstore.store.engine import ensure_private, writer_engine

VIEWS = {"v_sessions", "v_turns", "v_blocks", "v_selections", "v_observations"}


def test_the_code_expects_the_newest_revision() -> None:
    assert ScriptDirectory.from_config(alembic_config()).get_heads() == [schema.REVISION]


def test_migrations_and_schema_do_not_differ(tmp_path: Path) -> None:
    path = tmp_path / "recap.db"
    ensure_private(path)
    engine = writer_engine(path)
    migrate(engine, path)
    config = alembic_config()
    with engine.connect() as connection, connection.begin():
        context = MigrationContext.configure(
            connection, opts={"compare_type": True, "compare_server_default": True, "render_as_batch": True}
        )
        assert compare_metadata(context, schema.metadata) == []
        config.attributes["connection"] = connection
        command.check(config)
        assert set(inspect(connection).get_view_names()) == VIEWS
    engine.dispose()


def test_tables_are_equal_word_for_word(tmp_path: Path) -> None:
    """Reflection overlooks row layout and constraint names; the words of the tables' definitions do not."""
    texts: list[dict[str, Counter[str]]] = []
    for build in (lambda engine, path: migrate(engine, path), lambda engine, _: schema.metadata.create_all(engine)):
        path = tmp_path / f"{len(texts)}.db"
        ensure_private(path)
        engine = writer_engine(path)
        build(engine, path)
        with engine.connect() as connection:
            rows = connection.exec_driver_sql(
                "SELECT name, sql FROM sqlite_master WHERE type IN ('table', 'index') AND sql IS NOT NULL"
                " AND name != 'alembic_version'"
            )
            texts.append({name: Counter(re.findall(r"\w+", sql)) for name, sql in rows})
        engine.dispose()
    assert texts[0].keys() == texts[1].keys()
    for name, text in texts[0].items():
        assert text == texts[1][name]


def test_the_schema_is_valid_for_postgresql() -> None:
    dialect = postgresql.dialect()  # type: ignore[no-untyped-call]
    for table in schema.metadata.sorted_tables:
        text = str(CreateTable(table).compile(dialect=dialect))
        assert "WITHOUT ROWID" not in text
        if "id" in table.columns:
            assert "id BIGINT NOT NULL" in text
        for index in table.indexes:
            assert str(CreateIndex(index).compile(dialect=dialect))


def test_every_constraint_has_a_name() -> None:
    """Batch migrations can only drop what has one."""
    for table in schema.metadata.sorted_tables:
        assert all(constraint.name for constraint in table.constraints), table.name


def test_an_installed_package_migrates(tmp_path: Path) -> None:
    """From a copy of the packages that the distribution lists, outside the source tree."""
    root, copy = Path(__file__).parents[2], tmp_path / "lib"
    with (root / "pyproject.toml").open("rb") as file:
        packages = tomllib.load(file)["tool"]["setuptools"]["packages"]
    for package in packages:
        target = copy.joinpath(*package.split("."))
        target.mkdir(parents=True)
        for module in root.joinpath(*package.split(".")).glob("*.py"):
            shutil.copy(module, target)
    script = """if True:
        import sys
        sys.path.insert(0, sys.argv[1])
        import migrations
        from graphstore.store.archive import Archive
        assert migrations.__file__.startswith(sys.argv[1])
        Archive.open(sys.argv[2], count_tokens=len).close()
    """
    arguments = [sys.executable, "-c", script, str(copy), str(tmp_path / "recap.db")]
    subprocess.run(arguments, cwd=tmp_path, check=True, timeout=120)
