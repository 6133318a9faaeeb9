"""Run an ``AutoencoderKLWan`` over whole clips at once, for training.

diffusers feeds the autoencoder one latent frame at a time and caches the past, which keeps memory
low but makes thousands of small kernels. The same causal network over the whole clip needs a
fifth of them, and a three-frame convolution becomes a two-dimensional one over stacked channels.
The results agree with ``encode`` and ``decode`` to rounding; ``python sequence.py`` checks that.

Activations are ``[B, T, H, W, C]``, contiguous.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from diffusers import AutoencoderKLWan
from torch import Tensor, nn


def encode(vae: AutoencoderKLWan, clips: Tensor) -> tuple[Tensor, Tensor]:
    """Encode clips.

    Args:
        vae: Autoencoder with residual blocks (``is_residual``) and ``patch_size`` 2.
        clips: ``[B, 3, T, H, W]``, in [-1, 1]; T - 1 a multiple of 4.

    Returns:
        Mean and logarithm of the variance, ``[B, C, t, h, w]`` each.
    """
    encoder = vae.encoder
    x = _convolve(encoder.conv_in, _space_to_channels(clips))
    for block in encoder.down_blocks:
        shortcut = _first_and_rest(block.avg_shortcut, x)
        for layer in block.resnets:
            x = _residual(layer, x)
        if block.downsampler is not None:
            x = _downsample(block.downsampler, x)
        x = x + shortcut
    x = _convolve(encoder.conv_out, F.silu(_normalize(encoder.norm_out, _middle(encoder, x))))
    moments = _convolve(vae.quant_conv, x).permute(0, 4, 1, 2, 3)
    mean, log_variance = moments.float().chunk(2, dim=1)
    return mean, log_variance.clamp(-30, 20)


def decode(vae: AutoencoderKLWan, latents: Tensor) -> Tensor:
    """Decode latents ``[B, C, t, h, w]`` to unclamped clips ``[B, 3, T, H, W]``."""
    decoder = vae.decoder
    x = _convolve(vae.post_quant_conv, latents.permute(0, 2, 3, 4, 1))
    x = _middle(decoder, _convolve(decoder.conv_in, x))
    for block in decoder.up_blocks:
        entering = x
        for layer in block.resnets:
            x = _residual(layer, x)
        if block.upsampler is not None:
            x = _upsample(block.upsampler, x)
            x = x + _duplicate(block.avg_shortcut, entering)
    x = _convolve(decoder.conv_out, F.silu(_normalize(decoder.norm_out, x)))
    return _channels_to_space(x)


def _space_to_channels(clips: Tensor) -> Tensor:
    """``[B, 3, T, H, W]`` to ``[B, T, H/2, W/2, 12]`` in the order of diffusers' ``patchify``."""
    x = clips.unflatten(3, (-1, 2)).unflatten(5, (-1, 2))  # [B, 3, T, h, r, w, q]
    return x.permute(0, 2, 3, 5, 1, 6, 4).flatten(4)


def _channels_to_space(x: Tensor) -> Tensor:
    """``[B, T, h, w, 12]`` to ``[B, 3, T, 2h, 2w]``, the inverse of :func:`_space_to_channels`."""
    x = x.unflatten(4, (3, 2, 2))  # [B, T, h, w, 3, q, r]
    return x.permute(0, 4, 1, 2, 6, 3, 5).flatten(5, 6).flatten(3, 4)


def _convolve(conv: nn.Conv3d | nn.Conv2d, x: Tensor, past: int = 2) -> Tensor:
    """Convolve; a kernel of three frames sees ``past`` zero frames before the first."""
    weight = conv.weight
    if weight.ndim == 5:
        taps = weight.shape[2]
        if taps > 1:
            x = F.pad(x, (0, 0, 0, 0, 0, 0, past, 0))
            frames, stride = x.shape[1] - taps + 1, conv.stride[0]
            x = torch.cat([x[:, i : i + frames : stride] for i in range(taps)], dim=-1)
        weight = weight.transpose(1, 2).flatten(1, 2)  # [O, taps * C, kh, kw]
    batch = x.shape[0]
    if weight.shape[-1] == 1:
        return F.linear(x, weight.flatten(1), conv.bias)
    images = x.flatten(0, 1).permute(0, 3, 1, 2)
    weight = weight.contiguous(memory_format=torch.channels_last)
    stride = conv.stride[-1]
    if stride == 2:  # diffusers pads below and to the right only
        images = F.pad(images, (0, 1, 0, 1)).contiguous(memory_format=torch.channels_last)
    images = F.conv2d(images, weight, conv.bias, stride, 0 if stride == 2 else 1)
    return images.permute(0, 2, 3, 1).unflatten(0, (batch, -1)).contiguous()


def _normalize(norm: nn.Module, x: Tensor) -> Tensor:
    power = x.float().square().mean(dim=-1, keepdim=True)
    return x * (power + 1e-12).rsqrt().to(x.dtype) * norm.gamma.flatten().to(x.dtype)


def _residual(block: nn.Module, x: Tensor) -> Tensor:
    skip = x if isinstance(block.conv_shortcut, nn.Identity) else _convolve(block.conv_shortcut, x)
    x = _convolve(block.conv1, F.silu(_normalize(block.norm1, x)))
    return skip + _convolve(block.conv2, F.silu(_normalize(block.norm2, x)))


def _attend(block: nn.Module, x: Tensor) -> Tensor:
    """Single-head attention within each frame."""
    batch, _, height, width, _ = x.shape
    tokens = _convolve(block.to_qkv, _normalize(block.norm, x)).flatten(0, 1).flatten(1, 2)
    query, key, value = tokens.unsqueeze(1).chunk(3, dim=-1)  # [B T, 1, H W, C]
    mixed = F.scaled_dot_product_attention(query, key, value).squeeze(1)
    mixed = mixed.unflatten(1, (height, width)).unflatten(0, (batch, -1))
    return x + _convolve(block.proj, mixed)


def _middle(coder: nn.Module, x: Tensor) -> Tensor:
    block = coder.mid_block
    x = _residual(block.resnets[0], x)
    for attention, layer in zip(block.attentions, block.resnets[1:], strict=True):
        x = _residual(layer, _attend(attention, x))
    return x


def _downsample(block: nn.Module, x: Tensor) -> Tensor:
    """Halve rows and columns, and frames after the first where the block does so."""
    x = _convolve(block.resample[1], x)
    if block.mode == "downsample2d":
        return x
    return torch.cat([x[:, :1], _convolve(block.time_conv, x, past=0)], dim=1)


def _upsample(block: nn.Module, x: Tensor) -> Tensor:
    """Double rows and columns, and frames after the first where the block does so."""
    if block.mode == "upsample3d" and x.shape[1] > 1:
        pairs = _convolve(block.time_conv, x[:, 1:]).unflatten(4, (2, -1))  # [B, t, H, W, 2, C]
        x = torch.cat([x[:, :1], pairs.permute(0, 1, 4, 2, 3, 5).flatten(1, 2)], dim=1)
    x = x[:, :, :, None, :, None].expand(-1, -1, -1, 2, -1, 2, -1).flatten(4, 5).flatten(2, 3)
    return _convolve(block.resample[1], x)


def _first_and_rest(shortcut: nn.Module, x: Tensor) -> Tensor:
    """Apply a parameter-free shortcut to the first frame and to the others apart."""
    x = x.permute(0, 4, 1, 2, 3)
    parts = [shortcut(part) for part in (x[:, :, :1], x[:, :, 1:]) if part.shape[2]]
    return torch.cat(parts, dim=2).permute(0, 2, 3, 4, 1)


def _duplicate(shortcut: nn.Module, x: Tensor) -> Tensor:
    x = x.permute(0, 4, 1, 2, 3)
    parts = [shortcut(x[:, :, :1], first_chunk=True)]
    if x.shape[2] > 1:
        parts.append(shortcut(x[:, :, 1:]))
    return torch.cat(parts, dim=2).permute(0, 2, 3, 4, 1)


def main() -> None:
    """Compare with diffusers on random weights and clips."""
    torch.manual_seed(0)
    from build import build_vae
    from config import load

    vae = build_vae(load())
    with torch.no_grad():
        for frames in (1, 5, 13):
            clips = torch.rand(2, 3, frames, 48, 64) * 2 - 1
            posterior = vae.encode(clips).latent_dist
            mean, log_variance = encode(vae, clips)
            video = decode(vae, mean)
            expected = vae.decode(mean).sample
            errors = (
                (mean - posterior.mean).abs().max(),
                (log_variance - posterior.logvar).abs().max(),
                (video.clamp(-1, 1) - expected).abs().max(),
            )
            print(frames, [f"{e.item():.1e}" for e in errors], video.shape)


if __name__ == "__main__":
    main()
