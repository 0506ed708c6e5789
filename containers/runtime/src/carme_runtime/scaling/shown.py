"""A prediction as notebooks show it: its curve and its table."""

from dataclasses import dataclass

from carme_runtime.scaling.network import Machine
from carme_runtime.scaling.prediction import Prediction, predict
from carme_runtime.scaling.profiles import Profile
from carme_runtime.scaling.show import drawing, table


@dataclass(frozen=True, repr=False)
class Advice:
    """A prediction that notebooks show as its curve with its table, and terminals as the table."""

    profile: Profile
    prediction: Prediction

    @classmethod
    def of(cls, profile: Profile, ranks_per_node: int = 1, upto: int = 64) -> "Advice":
        """What a profile predicts."""
        return cls(profile, predict(profile, Machine(profile.links, ranks_per_node), upto))

    def __repr__(self) -> str:
        return table(self.prediction)

    def _repr_html_(self) -> str:
        return f"{drawing(self.prediction)}<pre>{table(self.prediction)}</pre>"
