"""What an update makes of the rows of earlier versions."""

import pytest
from django.db import connection
from django.db.migrations.executor import MigrationExecutor

from .fake_broker import NOW

BEFORE = [("notebooks", "0001_initial")]
AFTER = [("notebooks", "0002_states_of_carme")]


def migrate(target):
    executor = MigrationExecutor(connection)
    executor.migrate(target)
    return executor.loader.project_state(target).apps


@pytest.mark.django_db(transaction=True)
def test_the_earlier_states_become_those_of_carme() -> None:
    latest = MigrationExecutor(connection).loader.graph.leaf_nodes()
    try:
        apps = migrate([*BEFORE, ("jobs", "0001_initial"), ("accounts", "0001_initial")])
        owner = apps.get_model("accounts", "User").objects.create(username="alice")
        Session, Event = apps.get_model("notebooks", "Session"), apps.get_model("notebooks", "Event")
        Job = apps.get_model("jobs", "Job")
        rows = [
            # the state, the job's state, whether it ever ran, what it becomes
            ("requested", None, False, ("requested", "", False)),
            ("starting", None, False, ("requested", "", False)),
            ("starting", "PENDING", False, ("starting", "", False)),
            ("running", "RUNNING", True, ("ready", "", False)),
            ("stopping", "RUNNING", True, ("stopping", "", False)),
            ("ended", None, False, ("ended", "stopped", True)),
            ("ended", "COMPLETED", True, ("ended", "finished", True)),
            ("ended", "TIMEOUT", True, ("ended", "time_limit", True)),
            ("ended", "CANCELLED", True, ("ended", "stopped", True)),
            ("failed", None, False, ("ended", "refused", True)),
            ("failed", "FAILED", False, ("ended", "died_at_start", True)),
            ("failed", "FAILED", True, ("ended", "died", True)),
            ("failed", "OUT_OF_MEMORY", True, ("ended", "out_of_memory", True)),
            ("failed", "NODE_FAIL", True, ("ended", "node_failure", True)),
            ("failed", "PREEMPTED", True, ("ended", "preempted", True)),
        ]
        for number, (state, job_state, ran, _becomes) in enumerate(rows):
            session = Session.objects.create(
                name=f"s{number:08}", owner=owner, options={}, state=state, sentence="Why.",
                job_id=number if job_state else None,
            )  # fmt: skip
            if ran:
                Event.objects.create(session=session, state="running", at=NOW)
            if job_state:
                Job.objects.create(
                    id=number, kind="session", name="n", user="alice", account="", partition="gpu",
                    state=job_state, reason="", explanation="", nodes=1, node_list="", gpus=0, cpus=1,
                    memory_mb=1, active=False,
                )  # fmt: skip
        after = migrate(AFTER).get_model("notebooks", "Session").objects.order_by("name")
        assert [(row.state, row.ending, row.settled) for row in after] == [row[3] for row in rows]
        assert {row.sentence for row in after} == {"Why."}
    finally:
        migrate(latest)
