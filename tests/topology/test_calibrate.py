"""The fit: it finds constants that were planted, ignores a wild row, and never sees a row that it is scored on."""

import dataclasses

import numpy as np
import pytest

from lensjax.topology.calibrate import PARAMETERS, Problem, fit, left_out, predict, shipped
from lensjax.topology.collectives_table import Row


def make_rows(found, noise=0.0, seed=0):
    """Rows of two machines, timed by a known fit."""
    rng = np.random.default_rng(seed)
    rows = []
    for system in ("8x A100 lab", "8x A100 shop"):
        for n in (2, 4, 8):
            for size in 2.0 ** np.arange(15, 31, 2):
                rows.append(Row(len(rows) + 2, system, "intra", "all_reduce", n, size, None, 1.0))
    times = predict(found, rows) * np.exp(noise * rng.standard_normal(len(rows)))
    return [dataclasses.replace(r, seconds=float(t)) for r, t in zip(rows, times)]


@pytest.fixture(scope="module")
def planted():
    """The shipped constants, with the ring of these two systems changed."""
    base = shipped()
    return dataclasses.replace(
        base, systems={**base.systems, "8x A100 lab": {"ring": -0.3}, "8x A100 shop": {"ring": -0.2}}
    )


def test_planted_constants_are_found(planted):
    rows = make_rows(planted, noise=0.02)
    errors = np.abs(predict(fit(rows), rows) / np.array([r.seconds for r in rows]) - 1)
    assert np.median(errors) < 0.03


def test_one_wild_row_moves_little(planted):
    rows = make_rows(planted)
    wild = [dataclasses.replace(rows[20], seconds=rows[20].seconds * 20), *rows[:20], *rows[21:]]
    clean, bent = predict(fit(rows), rows), predict(fit(wild), rows)
    assert np.max(np.abs(bent / clean - 1)) < 0.1


def test_left_out_rows_have_no_say_in_their_prediction(planted):
    """Their times may be anything: predictions of the series stay bit for bit the same."""
    rows = make_rows(planted, noise=0.05)
    lied = [dataclasses.replace(r, seconds=r.seconds * 3) if r.series == rows[0].series else r for r in rows]
    honest, deaf = left_out(rows, lambda r: r.series), left_out(lied, lambda r: r.series)
    mine = [r.series == rows[0].series for r in rows]
    assert honest[mine].tolist() == deaf[mine].tolist()
    assert (honest[~np.array(mine)] != deaf[~np.array(mine)]).any()


def test_a_rate_beyond_the_links_is_not_believed(planted):
    rows = make_rows(planted)
    absurd = dataclasses.replace(rows[-1], line=99, system="8x A100 magic", seconds=rows[-1].seconds / 10)
    assert Problem([*rows, absurd]).weight[-1] == 0.0


def test_profiles_of_families_are_sane():
    found = shipped()
    for inner in ("volta", "ampere", "hopper", "blackwell", "cdna", "tpu", "cpu"):
        for outer in ("rdma", "efa"):
            profile = found.profile(inner, outer)
            assert 0.4 < profile.ring <= 1 and 0.3 < profile.ring_outer <= 1
            assert all(0 < p.fraction <= 1 for p in profile.protocols)
            assert list(p.fraction for p in profile.protocols) == sorted(p.fraction for p in profile.protocols)


def test_starts_and_spreads_are_positive():
    assert all(min(p.start, p.base, p.family, p.system) > 0 for p in PARAMETERS)
