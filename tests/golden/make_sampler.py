"""Makes sampler.npz from diffusers: the schedules and whole trajectories of its three solvers, with random velocities.

Run as `python tests/golden/make_sampler.py`, with the `parity` extra. Trajectories are in float64 from diffusers' float32 sigmas.
"""

from pathlib import Path

import numpy as np
import torch
from diffusers import DPMSolverMultistepScheduler, FlowMatchEulerDiscreteScheduler, UniPCMultistepScheduler

HERE = Path(__file__).parent
FLOW = {"prediction_type": "flow_prediction", "use_flow_sigmas": True}


def scheduler(solver: str, shift: float):
    """The diffusers scheduler of a solver, as Wan's scheduler_config.json sets it up."""
    match solver:
        case "unipc":
            return UniPCMultistepScheduler(flow_shift=shift, **FLOW)
        case "dpm":
            return DPMSolverMultistepScheduler(flow_shift=shift, **FLOW)
        case "euler":
            return FlowMatchEulerDiscreteScheduler(shift=shift)


def trajectory(theirs, x: np.ndarray, velocities: np.ndarray, start: int = 0, dtype: torch.dtype = torch.float32) -> np.ndarray:
    """The latents after each step that `theirs` (its timesteps set) takes with the given velocities, of the given dtype."""
    theirs.set_begin_index(start)
    sample, all_samples = torch.tensor(x), []
    for t, velocity in zip(theirs.timesteps[start:], velocities, strict=True):
        sample = theirs.step(torch.tensor(velocity).to(dtype), t, sample, return_dict=False)[0]
        all_samples.append(sample.double().numpy())
    return np.stack(all_samples)


def exact_trajectory(theirs, x: np.ndarray, velocities: np.ndarray, start: int = 0) -> np.ndarray:
    """The same in float64: its own update functions called on doubles, since `step` of Euler and DPM++ goes through float32."""
    theirs.sigmas = theirs.sigmas.double()
    n = len(theirs.timesteps)
    sample, all_samples = torch.tensor(x).double(), []
    theirs.set_begin_index(start)
    for i, velocity in zip(range(start, n), torch.tensor(velocities).double(), strict=True):
        if isinstance(theirs, UniPCMultistepScheduler):
            sample = theirs.step(velocity, theirs.timesteps[i], sample, return_dict=False)[0]
        elif isinstance(theirs, FlowMatchEulerDiscreteScheduler):
            sample = sample + (theirs.sigmas[i + 1] - theirs.sigmas[i]) * velocity
        else:
            theirs._step_index = i
            denoised = theirs.convert_model_output(velocity, sample=sample)
            theirs.model_outputs = [theirs.model_outputs[1], denoised]
            if i in (start, n - 1):
                sample = theirs.dpm_solver_first_order_update(denoised, sample=sample)
            else:
                sample = theirs.multistep_dpm_solver_second_order_update(theirs.model_outputs, sample=sample)
        all_samples.append(sample.numpy())
    return np.stack(all_samples)


def main() -> None:
    """Write sampler.npz."""
    rng = np.random.default_rng(0)
    arrays = {}
    for solver in ("unipc", "dpm", "euler"):
        for steps in (1, 2, 3, 4, 10, 40, 50):
            for shift in (1, 3, 5, 12, 16):
                theirs = scheduler(solver, float(shift))
                theirs.set_timesteps(steps)
                name = f"{solver}/{steps}/{shift}"
                arrays[f"{name}/timesteps"] = theirs.timesteps.numpy()
                arrays[f"{name}/sigmas"] = theirs.sigmas.numpy()
                if shift in (3, 12):
                    x = rng.standard_normal((1, 4)).astype(np.float32)
                    velocities = 1.4 * rng.standard_normal((steps, 1, 4)).astype(np.float32)
                    arrays[f"{name}/x"], arrays[f"{name}/velocities"] = x, velocities
                    arrays[f"{name}/latents"] = exact_trajectory(theirs, x, velocities).astype(np.float32)
    np.savez_compressed(HERE / "sampler.npz", **arrays)


if __name__ == "__main__":
    main()
