"""The mathematics: schedules, random draws, the denoiser contract and the closed-form ideal denoiser."""
