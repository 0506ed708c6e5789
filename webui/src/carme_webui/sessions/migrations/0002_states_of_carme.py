"""Sessions get the states of `carme.sessions`; the broker reports from now on what happens to them."""

from django.db import migrations, models

# How Slurm's word for the end of a job is called as the ending of a session.
ENDINGS = {
    "COMPLETED": "finished",
    "CANCELLED": "stopped",
    "TIMEOUT": "time_limit",
    "DEADLINE": "time_limit",
    "OUT_OF_MEMORY": "out_of_memory",
    "NODE_FAIL": "node_failure",
    "BOOT_FAIL": "node_failure",
    "PREEMPTED": "preempted",
}


def translate(apps, schema_editor):
    Session = apps.get_model("notebooks", "Session")
    Event = apps.get_model("notebooks", "Event")
    Job = apps.get_model("jobs", "Job")
    ran = set(Event.objects.filter(state="running").values_list("session_id", flat=True))
    for session in Session.objects.all():
        state = session.state
        if state == "running":
            session.state = "ready"
        elif state == "starting" and session.job_id is None:
            session.state = "requested"
        elif state in ("ended", "failed"):
            session.state = "ended"
            session.settled = True
            job = Job.objects.filter(id=session.job_id).first() if session.job_id else None
            if state == "ended":
                session.ending = ENDINGS.get(job.state, "stopped") if job else "stopped"
            elif job is None:
                session.ending = "refused"
            else:
                session.ending = ENDINGS.get(job.state, "died" if session.id in ran else "died_at_start")
        session.save()


class Migration(migrations.Migration):
    dependencies = [("notebooks", "0001_initial"), ("jobs", "0001_initial")]

    operations = [
        migrations.AddField("Session", "ending", models.CharField(max_length=32, blank=True, default=""), preserve_default=False),
        migrations.AddField("Session", "told", models.JSONField(null=True)),
        migrations.AddField("Session", "settled", models.BooleanField(default=False, db_index=True)),
        migrations.RemoveField("Session", "gone"),
        migrations.AlterField(
            "Session", "state", models.CharField(max_length=16, default="requested", db_index=True)
        ),
        migrations.RunPython(translate, migrations.RunPython.noop),
        migrations.DeleteModel("Event"),
    ]
