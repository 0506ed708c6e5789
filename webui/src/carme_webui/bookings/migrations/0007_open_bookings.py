from typing import ClassVar

from django.db import migrations, models


class Migration(migrations.Migration):
    dependencies: ClassVar = [("bookings", "0006_reserved")]

    operations: ClassVar = [
        migrations.AddIndex(
            model_name="booking",
            index=models.Index(
                fields=["start"], name="open_bookings", condition=models.Q(("state", "ended"), _negated=True)
            ),
        ),
        migrations.AddIndex(
            model_name="booking",
            index=models.Index(
                fields=["start"],
                name="shared_bookings",
                condition=models.Q(
                    models.Q(("state", "ended"), _negated=True), models.Q(("users", []), _negated=True)
                ),
            ),
        ),
    ]
