from typing import ClassVar

from django.db import migrations, models


class Migration(migrations.Migration):
    dependencies: ClassVar = [("notebooks", "0004_reported_and_requested")]

    operations: ClassVar = [
        migrations.AddField("Session", "language", models.CharField(max_length=10, blank=True, default="")),
    ]
