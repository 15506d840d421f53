"""Do the experiments of the field report run, each in its quick form?"""

import json

import field_report
import jax
import pytest

PNG = b"\x89PNG\r\n\x1a\n"



@pytest.mark.slow
@pytest.mark.usefixtures("as_users_run_it")
@pytest.mark.parametrize("name", field_report.EXPERIMENTS)
def test_the_quick_form_leaves_numbers_and_a_figure(name, tmp_path):
  assert field_report.main([name, "--quick", "--out", str(tmp_path)]) == 0
  result = json.loads((tmp_path / f"{name}.json").read_text())
  assert result["experiment"] == name and result["size"] == "quick"
  assert {"machine", "cpu_seconds"} <= result.keys() and ("seed" in result or "seeds" in result)
  assert result["machine"]["jax"] == jax.__version__
  assert (tmp_path / f"{name}.png").read_bytes().startswith(PNG)
