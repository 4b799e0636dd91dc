"""Fabrics: tiers from the wiring, pairs that break the tree, and placement against brute force."""

import itertools

import numpy as np
import pytest

from lensjax._errors import ClusterError
from lensjax.topology.catalogue import device
from lensjax.topology.embed import Routes, embedded_order, place_fabric
from lensjax.topology.fabric import Fabric, Link, effective_resistance, fabric, widest_paths
from lensjax.topology.hierarchy import cluster_of
from lensjax.topology.mesh import placement

H100 = device("H100-SXM5-80GB")


def nodes(count, per=8, nics=8, slow=None, lost=None, rack=4, nic=50e9, over=2):
    """Nodes of NVSwitch, PCIe and NICs, under leaf switches, under a spine with `over`:1 oversubscription."""
    links, first = [], 0
    for i in range(count):
        here = per - (i == lost)
        for j in range(here):
            links.append(Link(first + j, f"nvs{i}", 450e9, 1e-6, "nvlink"))
            links.append(Link(first + j, f"pcie{i}.{j * nics // per}", 64e9, 1e-6, "pcie"))
        for q in range(nics):
            links.append(Link(f"pcie{i}.{q}", f"nic{i}.{q}", 64e9, 1e-6, "pcie"))
            links.append(Link(f"nic{i}.{q}", f"leaf{i // rack}", nic * (0.5 if i == slow else 1), 2e-6, "leaf"))
        first += here
    links += [Link(f"leaf{r}", "spine", rack * nics * nic / over, 2e-6, "spine") for r in range(-(-count // rack))]
    return fabric(first, links, "a test")


def grid(shape, wrap, rate=50e9, drop=()):
    """A mesh or torus of devices."""
    links, at = [], np.arange(int(np.prod(shape))).reshape(shape)
    for axis, side in enumerate(shape):
        there = np.roll(at, -1, axis)
        keep = np.ones(shape, bool)
        if not wrap or side <= 2:
            keep[(slice(None),) * axis + (side - 1,)] = False
        links += [(int(a), int(b)) for a, b in zip(at[keep], there[keep])]
    return fabric(at.size, [Link(a, b, rate, 1e-6, "ici") for i, (a, b) in enumerate(links) if i not in drop])


def summary(found):
    cluster = cluster_of(found, H100).cluster
    return [(t.name, t.size, t.usable, t.nic_sharing) for t in cluster.tiers], cluster


def test_tiers_of_a_fat_tree_with_shared_nics_and_an_oversubscribed_spine():
    tiers, cluster = summary(nodes(8, nics=4))
    assert tiers == [("nvlink", 8, 450e9, 1), ("leaf", 32, 25e9, 2), ("spine", 64, 12.5e9, 2)]
    assert cluster.tiers[2].oversubscription == 2 and cluster.regular and cluster.order is None


def test_a_lost_gpu_is_an_empty_slot():
    tiers, cluster = summary(nodes(8, lost=3))
    assert [t[1] for t in tiers] == [8, 32, 64] and cluster.missing == (31,) and cluster.devices == 63


@pytest.mark.parametrize("nics", [1, 8])
def test_a_slow_nic_is_a_slow_link_not_another_tier(nics):
    tiers, cluster = summary(nodes(8, nics=nics, slow=2))
    assert [t[1] for t in tiers] == [8, 32, 64]
    (slow,) = [s for s in cluster.slow if s.tier == "leaf"]
    assert slow.factor == 0.5 and slow.slots == tuple(range(16, 24))


def test_devices_numbered_otherwise_end_up_in_the_same_tree():
    straight = nodes(4)
    names = np.random.default_rng(1).permutation(straight.devices)
    renamed = [
        Link(*(int(names[x]) if isinstance(x, int) else x for x in (k.a, k.b)), k.bandwidth, k.latency, k.kind)
        for k in straight.links
    ]
    one, two = cluster_of(straight, H100).cluster, cluster_of(fabric(straight.devices, renamed, "a test"), H100).cluster
    assert one.tiers == two.tiers
    pairs = np.array(list(itertools.combinations(range(straight.devices), 2)))
    assert (two.tier_of(names[pairs]) == one.tier_of(pairs)).all()


def test_widest_paths_are_the_best_bottlenecks():
    random = np.random.default_rng(0)
    for _ in range(20):
        found = random_fabric(random, 7)
        rates = np.zeros((7, 7))
        graph = found.graph()
        order = list(graph)
        rates = np.zeros((len(order), len(order)))
        for a, b, data in graph.edges(data=True):
            i, j = order.index(a), order.index(b)
            rates[i, j] = rates[j, i] = data["bandwidth"]
        for k in range(len(order)):  # Floyd and Warshall, with min and max
            rates = np.maximum(rates, np.minimum(rates[:, k : k + 1], rates[k : k + 1]))
        expected = rates[:7, :7]
        np.fill_diagonal(expected, np.inf)
        assert np.array_equal(widest_paths(found), expected)


def test_effective_resistance_of_what_one_can_do_by_hand():
    series = fabric(3, [Link(0, 1, 2.0), Link(1, 2, 2.0)])
    assert effective_resistance(series)[0, 2] == pytest.approx(1.0)
    ring = fabric(3, [Link(0, 1, 1.0), Link(1, 2, 1.0), Link(2, 0, 1.0)])
    assert effective_resistance(ring)[0, 1] == pytest.approx(2 / 3)
    parallel = fabric(2, [Link(0, 1, 1.0), Link(0, 1, 3.0)])
    assert effective_resistance(parallel)[0, 1] == pytest.approx(0.25)


CUBE = [
    (0, 1, 1),
    (0, 2, 1),
    (0, 3, 2),
    (0, 4, 2),
    (1, 2, 2),
    (1, 3, 1),
    (1, 5, 2),
    (2, 3, 2),
    (2, 6, 1),
    (3, 7, 1),
    (4, 5, 1),
    (4, 6, 1),
    (4, 7, 2),
    (5, 6, 2),
    (5, 7, 1),
    (6, 7, 2),
]  # DGX-1 V100: NVLinks a pair


def test_a_cube_mesh_is_one_tier_and_names_the_pairs_that_break_it():
    found = cluster_of(fabric(8, [Link(a, b, 25e9 * n, 1e-6, "nvlink") for a, b, n in CUBE]), H100)
    assert [(t.size, t.bandwidth, t.kind) for t in found.cluster.tiers] == [(8, 150e9, "mesh")]
    broken = {(a, b) for a, b, _ in found.breaking}
    assert {(0, 5), (0, 6), (0, 7)} <= broken and (0, 3) not in broken
    assert sorted(found.cluster.order or range(8)) == list(range(8))


def test_a_full_mesh_breaks_nothing():
    pairs = itertools.combinations(range(8), 2)
    found = cluster_of(fabric(8, [Link(a, b, 64e9, 1e-6, "xgmi") for a, b in pairs]), H100)
    assert found.breaking == () and found.cluster.tiers[0].bandwidth == 7 * 64e9


def test_an_embedding_keeps_neighbours_of_a_torus_together():
    order = embedded_order(grid((4, 4), True))
    half = {(i // 4, i % 4) for i in order[:8]}
    assert len({r for r, _ in half}) == 2 or len({c for _, c in half}) == 2


def random_fabric(random, devices):
    """A tree, mesh, torus or anything, some with broken cables."""
    kind = random.integers(4)
    if kind == 0:  # a tree of switches with unequal uplinks
        switches = [f"s{i}" for i in range(random.integers(1, 4))]
        links = [Link(d, str(random.choice(switches)), float(random.choice([100, 200, 400]))) for d in range(devices)]
        return fabric(devices, links + [Link(s, "top", float(random.choice([25, 50, 100]))) for s in switches])
    if kind == 1:  # a grid of one or two dimensions
        rows = int(random.choice([r for r in (1, 2, 3) if devices % r == 0]))
        links = list(grid((rows, devices // rows), bool(random.integers(2)), 50.0).links)
    else:  # a ring and chords
        links = (
            [Link(d, (d + 1) % devices, float(random.choice([25, 50]))) for d in range(devices)]
            if devices > 2
            else [Link(0, 1, 50.0)]
        )
        chords = [p for p in itertools.combinations(range(devices), 2) if random.random() < 0.3]
        links += [Link(a, b, float(random.choice([25, 50, 100]))) for a, b in chords]
    for _ in range(int(random.integers(3))):  # break some cables, as long as all stay joined
        spare = int(random.integers(len(links)))
        try:
            links = list(fabric(devices, links[:spare] + links[spare + 1 :]).links)
        except ClusterError:
            continue
    return fabric(devices, links)


def best_by_brute_force(routes, shape, nbytes):
    """Every order, but for rolling the mesh along its axes, which changes no ring: device 0 stands first."""
    rest = np.array(list(itertools.permutations(range(1, int(np.prod(shape))))))
    orders = np.concatenate([np.zeros((len(rest), 1), int), rest], axis=1)
    return min(
        float(routes.seconds(part, shape, nbytes).min()) for part in np.array_split(orders, max(1, len(orders) // 2000))
    )


SHAPES = {4: (2, 2), 5: (5,), 6: (2, 3), 8: (2, 4), 9: (3, 3)}


def check_against_brute_force(seeds, sizes):
    worst, total = 1.0, 0
    for seed in seeds:
        random = np.random.default_rng(seed)
        devices = int(random.choice(sizes))
        found, shape = random_fabric(random, devices), SHAPES[devices]
        nbytes = [float(random.choice([1, 3, 10])) for _ in shape]
        axes = {f"a{i}": n for i, n in enumerate(shape)}
        order, cost = place_fabric(found, axes, dict(zip(axes, nbytes)))
        routes = Routes(found)
        assert sorted(order.ravel().tolist()) == list(range(devices))
        assert cost == pytest.approx(float(routes.seconds(order.reshape(1, -1), shape, nbytes)[0]))
        worst = max(worst, cost / best_by_brute_force(routes, shape, nbytes))
        total += 1
    assert worst <= 1.05, f"{worst} over {total} fabrics"


@pytest.mark.slow
def test_placement_is_as_good_as_brute_force_on_small_fabrics():
    check_against_brute_force(range(1000, 1150), [4, 5, 6])


def test_placement_is_as_good_as_brute_force_on_eight_devices():
    check_against_brute_force(range(2000, 2045), [8])


@pytest.mark.slow
def test_placement_is_as_good_as_brute_force_on_nine_devices():
    check_against_brute_force(range(200), [6, 8, 9])


def test_sixteen_thousand_devices_are_read_and_placed():
    found = nodes(2048, rack=32, over=1)
    cluster = cluster_of(found, H100).cluster
    placed = placement(cluster, {"data": 64, "fsdp": 32, "model": 8})
    assert [t.size for t in cluster.tiers] == [8, 256, 16384] and placed.order.size == 16384


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: fabric(3, [Link(0, 1, 1.0)]), r"devices \[2\] have no path"),
        (lambda: fabric(2, [Link(0, 5, 1.0)]), "devices 0..1"),
        (lambda: fabric(2, [Link(0, 1, 0.0)]), "positive"),
        (lambda: fabric(2, [Link(0, 0, 1.0)]), "link 0-0"),
        (lambda: Routes(nodes(17)), "too many"),
        (lambda: place_fabric(nodes(1), {"a": 3}, {}), "need 3"),
    ],
)
def test_a_wrong_fabric_is_an_error(make, said):
    with pytest.raises(ClusterError, match=said):
        make()


def test_one_device_alone():
    assert cluster_of(Fabric(1, (), "alone"), H100).cluster.devices == 1
