"""The tables of an outbox, and the models that read them."""

from django.db import migrations
from django.db.migrations.state import ModelState

from pillarbox.django.models import DeadLetter, Event
from pillarbox.django.schema import RunSchema

# The models are not managed and follow the tables, so that their fields stand in one place.
_MODELS = [ModelState.from_model(model) for model in (Event, DeadLetter)]


class Migration(migrations.Migration):
    initial = True

    operations = [  # noqa: RUF012
        RunSchema(1),
        *(
            migrations.CreateModel(model.name, [*model.fields.items()], model.options, model.bases, model.managers)
            for model in _MODELS
        ),
    ]
