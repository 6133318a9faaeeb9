"""Make the four modules of the pipeline from the configuration, with random weights."""

from __future__ import annotations

from captions import END, PAD, vocabulary
from config import Config
from diffusers import AutoencoderKLWan, UniPCMultistepScheduler, WanTransformer3DModel
from transformers import UMT5Config, UMT5EncoderModel


def build_vae(
    config: Config, mean: list[float] | None = None, std: list[float] | None = None
) -> AutoencoderKLWan:
    """Make the autoencoder.

    Args:
        config: Geometry.
        mean: Mean of each latent channel over training clips; zeros if not measured yet.
        std: Standard deviation of each latent channel; ones if not measured yet.
    """
    vae = config.vae
    return AutoencoderKLWan(
        base_dim=vae.base_dim,
        decoder_base_dim=vae.decoder_base_dim,
        z_dim=vae.z_dim,
        dim_mult=list(vae.dim_mult),
        num_res_blocks=vae.num_res_blocks,
        temperal_downsample=list(vae.temporal_downsample),
        latents_mean=[0.0] * vae.z_dim if mean is None else mean,
        latents_std=[1.0] * vae.z_dim if std is None else std,
        in_channels=3 * vae.patch_size**2,
        out_channels=3 * vae.patch_size**2,
        patch_size=vae.patch_size,
        is_residual=True,
        scale_factor_spatial=vae.spatial_factor,
        scale_factor_temporal=vae.temporal_factor,
    )


def build_transformer(config: Config) -> WanTransformer3DModel:
    """Make the denoiser."""
    geometry = config.transformer
    return WanTransformer3DModel(
        patch_size=tuple(geometry.patch_size),
        num_attention_heads=geometry.num_heads,
        attention_head_dim=geometry.head_dim,
        in_channels=config.vae.z_dim,
        out_channels=config.vae.z_dim,
        text_dim=config.text.dim,
        freq_dim=geometry.freq_dim,
        ffn_dim=geometry.ffn_dim,
        num_layers=geometry.num_layers,
        rope_max_seq_len=geometry.max_rope_length,
    )


def build_text_encoder(config: Config) -> UMT5EncoderModel:
    """Make the text encoder."""
    text, words = config.text, vocabulary()
    return UMT5EncoderModel(
        UMT5Config(
            vocab_size=len(words),
            d_model=text.dim,
            d_kv=text.head_dim,
            d_ff=text.ffn_dim,
            num_layers=text.num_layers,
            num_heads=text.num_heads,
            dropout_rate=0.0,
            pad_token_id=words.index(PAD),
            eos_token_id=words.index(END),
        )
    )


def build_scheduler(config: Config) -> UniPCMultistepScheduler:
    """Make the sampler: UniPC on flow-matching sigmas, shifted as in training."""
    return UniPCMultistepScheduler(
        prediction_type="flow_prediction",
        use_flow_sigmas=True,
        flow_shift=config.flow.shift,
        num_train_timesteps=1000,
    )
