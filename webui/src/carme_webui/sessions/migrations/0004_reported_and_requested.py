from typing import ClassVar

from django.db import migrations


class Migration(migrations.Migration):
    dependencies: ClassVar = [("notebooks", "0003_presets")]

    operations: ClassVar = [
        migrations.RenameField("Session", "told", "reported"),
        migrations.RenameField("Session", "asked", "requested_at"),
    ]
