import pytest
from pydantic import ValidationError

from app.contract.worker_labels import meets, parse_labels
from app.settings import Settings


def test_labels_are_separated_by_commas() -> None:
    assert parse_labels("zone=a, gpu_type=NVIDIA H100 80GB HBM3,,team.org/x=1") == {
        "zone": "a", "gpu_type": "NVIDIA H100 80GB HBM3", "team.org/x": "1",
    }  # fmt: skip
    assert parse_labels(" ") == {}


@pytest.mark.parametrize(
    "text", ["zone", "zone=", "=a", "zone=a=b", "zone=a,zone=b", "a b=c", f"x={101 * 'a'}", "x=a\nb",
             "x=a\x9bb", "x=\u202eb", ",".join(f"n{i}=1" for i in range(17))],
)  # fmt: skip
def test_other_labels_are_rejected(text: str) -> None:
    with pytest.raises(ValueError, match="name=value"):
        parse_labels(text)
    with pytest.raises(ValidationError, match="name=value"):
        Settings(worker_labels=text)


def test_all_requirements_must_be_met() -> None:
    assert meets({"zone": "a", "disk": "ssd"}, {"zone": "a"})
    assert not meets({"zone": "a"}, {"zone": "a", "disk": "ssd"})
    assert not meets({"zone": "a"}, {"zone": "b"})
