"""What stops a study, as a sentence for people."""

from proxy.errors import RecapError


class LabError(RecapError):
    """Data, a model or a former run is not what the study needs. The text names the value and the remedy."""
