"""What can happen to the file of an archive between a death and the next start, and its repair."""

import argparse
import io
import sqlite3
from contextlib import closing, redirect_stdout
from pathlib import Path
from random import Random
from typing import Literal
from unittest import mock

from graphstore.store import archive, schema
from graphstore.store.engine import ArchiveUnavailable
from proxy.commands import repair
from proxy.settings import Settings
from tests.archives import lay_out_archive
from tests.properties.promises import require

Damage = Literal["bit", "cut", "newer", "log lost"]
DAMAGES: tuple[Damage, ...] = ("bit", "cut", "newer", "log lost")


def log_of(path: Path) -> Path:
    return path.with_name(f"{path.name}-wal")


def harm(path: Path, damage: Damage, random: Random) -> None:
    path.with_name(f"{path.name}-shm").unlink(missing_ok=True)
    if damage == "log lost":
        log_of(path).unlink(missing_ok=True)
        return
    if damage == "newer":
        with closing(sqlite3.connect(path)) as db, db:
            db.execute("UPDATE alembic_version SET version_num = '9999'")
        return
    data = bytearray(path.read_bytes())
    place = random.randrange(len(data))
    if damage == "cut":
        path.write_bytes(data[:place])
    else:
        data[place] ^= 1 << random.randrange(8)
        path.write_bytes(data)


def upgrade(path: Path) -> None:
    """What a person does about a newer archive: start the version that knows it."""
    with closing(sqlite3.connect(path)) as db, db:
        db.execute("UPDATE alembic_version SET version_num = ?", (schema.REVISION,))


def mend(settings: Settings) -> str:
    """`recap repair`, and what it says. Afterwards the archive verifies; the bytes that it had are there as well."""
    path = Path(settings.db)
    was, log = path.read_bytes(), log_of(path)
    was_log = log.read_bytes() if log.exists() else None
    known = set(path.parent.glob("*.damaged-*"))
    said = io.StringIO()
    migrate = archive.migrate

    def laid_out(engine: object, place: Path) -> None:
        """Migrations are tested elsewhere, and take longer than a history."""
        if place != path and not place.stat().st_size:
            place.unlink()
            lay_out_archive(place)
        migrate(engine, place)  # type: ignore[arg-type]

    try:
        with redirect_stdout(said), mock.patch.object(archive, "migrate", laid_out):
            code = repair.run(argparse.Namespace(output=None), settings)
    except ArchiveUnavailable as error:
        if error.kind == "corrupt":  # nothing of it can be read: a person puts it away and begins anew
            path.rename(f"{path}.damaged-whole")
            log.unlink(missing_ok=True)
            lay_out_archive(path)
            return str(error)
        require(error.kind == "newer" and path.read_bytes() == was, "never lose", f"refused, or changed: {error}")
        return str(error)
    require(code == 0, "verify", f"repair ended with {code}: {said.getvalue()}")
    if "nothing to repair" not in said.getvalue():
        aside = [f for f in set(path.parent.glob("*.damaged-*")) - known if not f.name.endswith("-wal")]
        kept = [f for f in aside if f.read_bytes() == was]
        require(kept, "never lose", "the damaged file was not kept as it was")
        logs = [log_of(f).read_bytes() for f in kept if log_of(f).exists()]
        require(was_log is None or logs == [was_log], "never lose", "the damaged file's log was not kept")
    return said.getvalue()
