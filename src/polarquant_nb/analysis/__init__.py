"""What formats do to vectors, as xarray datasets: angles, errors, bits, attention.

Arrays are NumPy's, torch's, or xarray's, with tokens and their coordinates last.  A DataArray may
lie in an open file or be dask's: it is read piece by piece, and never held whole.  :func:`capture`
records the queries, keys and values of a model.

>>> import polarquant_nb as pq
>>> captured = pq.analysis.capture(model, text, tokenizer)  # doctest: +SKIP
>>> captured.to_netcdf("captured.nc", engine="h5netcdf")  # doctest: +SKIP
>>> captured = xr.open_dataset("captured.nc", chunks={"layer": 1})  # doctest: +SKIP
>>> pq.analysis.angles(captured.key, fmt, by="layer")  # doctest: +SKIP
"""

from polarquant_nb.analysis.angle_histograms import angle_error, angles
from polarquant_nb.analysis.attention_rows import attention_error
from polarquant_nb.analysis.capturing import capture
from polarquant_nb.analysis.round_trips import distortion, rate_distortion

__all__ = [
    "angle_error",
    "angles",
    "attention_error",
    "capture",
    "distortion",
    "rate_distortion",
]
