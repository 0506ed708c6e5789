from typing import ClassVar

from django.db import migrations


class Migration(migrations.Migration):
    dependencies: ClassVar = [("projects", "0001_initial")]

    operations: ClassVar = [
        migrations.RenameField("Project", "kept", "granted"),
    ]
