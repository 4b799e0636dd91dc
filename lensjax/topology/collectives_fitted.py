"""Constants fitted to published collectives, by benchmarks/fit_collectives.py from tests/data/collectives.csv.

Made, not edited. Logarithms; see calibrate.Fit. Deviations below 0.5 % are left out.
"""

# fmt: off
BASE = {
    'launch': -11.028, 'launch_outer': -11.668, 'hop': 0.369, 'hop_outer': 0.931, 'ring': -0.289, 'ring_outer': -0.189,
    'direct': -0.393, 'direct_outer': -0.329, 'direct_base': -10.488, 'multicast': -0.576, 'multicast_base': -10.4,
    'peer': -11.869, 'thin': -1.491, 'middle': -0.111, 'shard_launch': -9.795, 'shard_peer': -10.206,
    'shard_copy': 26.207,
}
FAMILIES = {
    'inner/ampere': {
        'launch': 0.57, 'hop': 0.053, 'ring': -0.032, 'direct': -0.063, 'direct_base': -0.281, 'peer': -0.303,
        'thin': 0.135, 'middle': -0.017,
    },
    'inner/blackwell': {
        'launch': -0.76, 'hop': 0.494, 'ring': 0.019, 'direct': 0.06, 'multicast': -0.115, 'multicast_base': 0.009,
        'peer': 0.063, 'thin': -0.079, 'middle': -0.014,
    },
    'inner/cdna': {
        'launch': 0.955, 'hop': 0.323, 'ring': -0.09, 'direct': -0.017, 'direct_base': 0.596, 'peer': 0.577,
        'thin': -0.349, 'middle': 0.054, 'shard_launch': -0.006, 'shard_copy': 0.008,
    },
    'inner/hopper': {
        'launch': -0.946, 'hop': -0.514, 'ring': -0.035, 'multicast': -0.008, 'multicast_base': 0.136, 'thin': 0.27,
        'middle': -0.046,
    },
    'inner/tpu': {
        'hop': 0.059, 'ring': -0.028,
    },
    'inner/volta': {
        'launch': -0.26, 'hop': -0.035, 'ring': 0.084, 'middle': -0.096,
    },
    'outer/efa': {
        'launch_outer': -0.456, 'hop_outer': 0.143, 'ring_outer': -0.02,
    },
    'outer/rdma': {
        'launch_outer': 0.032, 'hop_outer': 0.135, 'ring_outer': -0.119, 'direct_outer': -0.024,
    },
}
SYSTEMS = {
    '8x A100 single node (NVLink3)': {
        'launch': -0.117, 'hop': -0.067, 'ring': 0.022, 'thin': -0.222, 'middle': 0.065,
    },
    '8x B200 single node': {
        'launch': -0.242, 'hop': -0.361, 'multicast': 0.046,
    },
    '8x H200 single node (NVLink4)': {
        'launch': -0.371, 'hop': -0.3, 'ring': 0.204, 'multicast': 0.056, 'multicast_base': 0.048, 'thin': 0.362,
    },
    '8x MI300X single node': {
        'ring': 0.051,
    },
    'A100 8-GPU node NVLink3/NVSwitch (vTrain trace)': {
        'launch': -0.071, 'hop': -0.415, 'ring': -0.02, 'thin': -0.008, 'middle': 0.056,
    },
    'A100 node 4x200G': {
        'ring_outer': 0.141,
    },
    'AWS 2x p4de.24xlarge (A100-80, 4x100 Gb/s EFA per node)': {
        'launch': -0.048, 'launch_outer': -0.014, 'hop': 0.442, 'hop_outer': 0.653, 'middle': -0.167,
    },
    'AWS 2x p5.48xlarge (H100, 3200 Gb/s EFA per node)': {
        'launch': -0.12, 'launch_outer': -0.11, 'hop': -0.043, 'hop_outer': -0.103, 'ring': -0.238,
        'multicast_base': 0.092, 'thin': -0.241, 'middle': -0.046,
    },
    'AWS 4x p6-b200 (B200, EFA)': {
        'launch': -0.15, 'launch_outer': -0.117, 'hop': 0.732, 'hop_outer': -0.483, 'ring_outer': -0.083,
        'multicast_base': 0.006, 'thin': -0.038, 'middle': -0.014,
    },
    'DGX H100 single node': {
        'multicast': 0.037,
    },
    'GCP A4X GB200 (4 GPUs/node)': {
        'hop': -0.057, 'hop_outer': 0.006, 'ring': 0.018, 'ring_outer': -0.217, 'direct': 0.06, 'direct_outer': -0.035,
        'multicast': -0.075, 'peer': 0.063,
    },
    'H100 8x400G nodes': {
        'hop_outer': 0.031, 'ring_outer': -0.118, 'multicast': -0.092, 'multicast_base': 0.012,
    },
    'Hetu-Galvatron shipped profile (accelerator not stated; values fit A100 NVLink3 + ~100 Gb/s per node)': {
        'launch': 0.445, 'launch_outer': 0.01, 'hop': 0.073, 'hop_outer': 0.051, 'ring': -0.059, 'ring_outer': -0.229,
        'direct': -0.063, 'direct_outer': -0.06, 'direct_base': -0.281, 'peer': -0.303, 'thin': 0.377,
        'middle': -0.014,
    },
    'MI200 16-GCD node (nnscaler profile)': {
        'launch': 0.493, 'hop': 0.203, 'ring': -0.14, 'direct': -0.017, 'direct_base': 0.596, 'peer': 0.577,
        'thin': -0.155, 'middle': 0.054, 'shard_launch': -0.145, 'shard_peer': 0.05, 'shard_copy': 0.068,
    },
    'TPU v6e-256 slice': {
        'hop': 0.038, 'ring': -0.028,
    },
    'V100 8-GPU node NVLink2 (vTrain trace)': {
        'launch': -0.131, 'hop': -0.025, 'ring': 0.084, 'middle': -0.096,
    },
}
SUBSETS = {
    '8x H200 single node (NVLink4)': {
        'ring/8': 0.008,
    },
    '8x MI300X single node': {
        'ring/2': 0.007,
    },
    'A100 8-GPU node NVLink3/NVSwitch (vTrain trace)': {
        'ring/2': -0.067, 'ring/3': -0.014, 'ring/4': 0.009, 'ring/5': 0.013, 'ring/6': 0.025, 'ring/7': 0.011,
        'ring/8': 0.028,
    },
    'AWS 2x p5.48xlarge (H100, 3200 Gb/s EFA per node)': {
        'ring/16': -0.01,
    },
    'GCP A4X GB200 (4 GPUs/node)': {
        'ring/4': -0.015, 'direct/8': 0.028, 'ring/8': 0.01, 'ring/16': -0.013, 'direct/144': -0.029,
        'ring/144': 0.011,
    },
    'Hetu-Galvatron shipped profile (accelerator not stated; values fit A100 NVLink3 + ~100 Gb/s per node)': {
        'direct/2': -0.043, 'ring/2': -0.007, 'direct/4': 0.02, 'direct/8': 0.02, 'ring/16': -0.006,
    },
    'MI200 16-GCD node (nnscaler profile)': {
        'direct/2': 0.041, 'ring/2': 1.346, 'direct/4': -0.115, 'ring/4': -0.984, 'ring/8': -1.104,
        'direct/16': -0.122, 'ring/16': -0.804,
    },
    'V100 8-GPU node NVLink2 (vTrain trace)': {
        'ring/2': 0.022, 'ring/3': 0.018, 'ring/4': -0.008, 'ring/5': -0.085, 'ring/6': 0.037, 'ring/7': -0.005,
        'ring/8': 0.025,
    },
}
