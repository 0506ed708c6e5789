from typing import ClassVar

from django.db import migrations


class Migration(migrations.Migration):
    dependencies: ClassVar = [("announcements", "0001_initial")]

    operations: ClassVar = [
        migrations.RenameField("Maintenance", "kept", "reserved"),
    ]
