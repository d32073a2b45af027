"""ML-KEM-768 from FIPS 203, in Python's integers, slowly: an oracle for the library, and of use in vectors.

The library takes no randomness for an encapsulation. This one does (``encapsulate(key, m)``, algorithm
17), so that a vector's run can be repeated byte for byte. Numbers of algorithms and equations are the
standard's (August 2024). Not in constant time: for tests alone.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable

N, Q, K, ETA, DU, DV = 256, 3329, 3, 2, 10, 4

Polynomial = list[int]


def keys(seed: bytes) -> tuple[bytes, bytes]:
    """Encapsulation and decapsulation key of a seed d, z (algorithms 13 and 16)."""
    d, z = seed[:32], seed[32:]
    hashed = hashlib.sha3_512(d + bytes([K])).digest()
    rho, sigma = hashed[:32], hashed[32:]
    a = _matrix(rho)
    s = [_ntt(_noise(sigma, number)) for number in range(K)]
    e = [_ntt(_noise(sigma, K + number)) for number in range(K)]
    t = [_sum([*(_times(a[i][j], s[j]) for j in range(K)), e[i]]) for i in range(K)]
    public = b"".join(_encode(part, 12) for part in t) + rho
    private = b"".join(_encode(part, 12) for part in s)
    return public, private + public + hashlib.sha3_256(public).digest() + z


def encapsulate(public: bytes, m: bytes) -> tuple[bytes, bytes]:
    """Shared secret and ciphertext of 32 random bytes m (algorithm 17)."""
    hashed = hashlib.sha3_512(m + hashlib.sha3_256(public).digest()).digest()
    return hashed[:32], _encrypt(public, m, hashed[32:])


def decapsulate(private: bytes, ciphertext: bytes) -> bytes:
    """Shared secret (algorithm 18); of an altered ciphertext another one, by implicit rejection."""
    size = 384 * K
    s, public = private[:size], private[size : 2 * size + 32]
    h, z = private[2 * size + 32 : 2 * size + 64], private[2 * size + 64 :]
    m = _decrypt(s, ciphertext)
    hashed = hashlib.sha3_512(m + h).digest()
    if _encrypt(public, m, hashed[32:]) == ciphertext:
        return hashed[:32]
    return hashlib.shake_256(z + ciphertext).digest(32)


def _encrypt(public: bytes, m: bytes, r: bytes) -> bytes:
    """Algorithm 14."""
    size = 384 * K
    t = [_decode(public[i : i + 384], 12) for i in range(0, size, 384)]
    a = _matrix(public[size:])
    y = [_ntt(_noise(r, number)) for number in range(K)]
    e1 = [_noise(r, K + number) for number in range(K)]
    e2 = _noise(r, 2 * K)
    u = [_sum([_inverse_ntt(_sum(_times(a[j][i], y[j]) for j in range(K))), e1[i]]) for i in range(K)]
    mu = [_decompress(bit, 1) for bit in _decode(m, 1)]
    v = _sum([_inverse_ntt(_sum(_times(t[i], y[i]) for i in range(K))), e2, mu])
    c1 = b"".join(_encode([_compress(value, DU) for value in part], DU) for part in u)
    return c1 + _encode([_compress(value, DV) for value in v], DV)


def _decrypt(private: bytes, ciphertext: bytes) -> bytes:
    """Algorithm 15."""
    width = 32 * DU
    parts = [ciphertext[i : i + width] for i in range(0, K * width, width)]
    u = [[_decompress(value, DU) for value in _decode(part, DU)] for part in parts]
    v = [_decompress(value, DV) for value in _decode(ciphertext[K * width :], DV)]
    s = [_decode(private[i : i + 384], 12) for i in range(0, 384 * K, 384)]
    product = _inverse_ntt(_sum(_times(s[i], _ntt(u[i])) for i in range(K)))
    return _encode([_compress((a - b) % Q, 1) for a, b in zip(v, product, strict=True)], 1)


def _matrix(rho: bytes) -> list[list[Polynomial]]:
    return [[_uniform(rho + bytes([j, i])) for j in range(K)] for i in range(K)]


def _uniform(seed: bytes) -> Polynomial:
    """Algorithm 7: coefficients below q from a stream of 12-bit numbers."""
    stream, place = hashlib.shake_128(seed).digest(3 * N * 4), 0
    found: Polynomial = []
    while len(found) < N:
        low = stream[place] + 256 * (stream[place + 1] % 16)
        high = stream[place + 1] // 16 + 16 * stream[place + 2]
        found += [value for value in (low, high) if value < Q]
        place += 3
    return found[:N]


def _noise(seed: bytes, number: int) -> Polynomial:
    """Algorithm 8, of the function in equation 4.3."""
    bits = _bits(hashlib.shake_256(seed + bytes([number])).digest(64 * ETA))
    pairs = [bits[i : i + 2 * ETA] for i in range(0, len(bits), 2 * ETA)]
    return [(sum(pair[:ETA]) - sum(pair[ETA:])) % Q for pair in pairs]


def _bits(data: bytes) -> list[int]:
    return [byte >> place & 1 for byte in data for place in range(8)]


def _encode(values: Polynomial, width: int) -> bytes:
    """Algorithm 5."""
    joined = sum(value << width * place for place, value in enumerate(values))
    return joined.to_bytes(32 * width, "little")


def _decode(data: bytes, width: int) -> Polynomial:
    """Algorithm 6."""
    joined, modulus = int.from_bytes(data, "little"), Q if width == 12 else 2**width
    return [(joined >> width * place) % 2**width % modulus for place in range(N)]


def _compress(value: int, width: int) -> int:
    """Equation 4.7; q is odd, so that no value is half way between two integers."""
    return (2 * value * 2**width + Q) // (2 * Q) % 2**width


def _decompress(value: int, width: int) -> int:
    """Equation 4.8, halves rounded up."""
    return (2 * value * Q + 2**width) // 2 ** (width + 1)


def _sum(parts: Iterable[Polynomial]) -> Polynomial:
    return [sum(values) % Q for values in zip(*parts, strict=True)]


_REVERSED = [int(f"{number:07b}"[::-1], 2) for number in range(128)]
_ZETAS = [pow(17, place, Q) for place in _REVERSED]


def _ntt(values: Polynomial) -> Polynomial:
    """Algorithm 9."""
    out, place, length = list(values), 1, 128
    while length >= 2:
        for start in range(0, N, 2 * length):
            zeta, place = _ZETAS[place], place + 1
            for j in range(start, start + length):
                turned = zeta * out[j + length] % Q
                out[j + length], out[j] = (out[j] - turned) % Q, (out[j] + turned) % Q
        length //= 2
    return out


def _inverse_ntt(values: Polynomial) -> Polynomial:
    """Algorithm 10."""
    out, place, length = list(values), 127, 2
    while length <= 128:
        for start in range(0, N, 2 * length):
            zeta, place = _ZETAS[place], place - 1
            for j in range(start, start + length):
                low, high = out[j], out[j + length]
                out[j], out[j + length] = (low + high) % Q, zeta * (high - low) % Q
        length *= 2
    return [value * 3303 % Q for value in out]


def _times(f: Polynomial, g: Polynomial) -> Polynomial:
    """Algorithms 11 and 12: a product in the domain of the transform."""
    out = []
    for i in range(128):
        gamma = pow(17, 2 * _REVERSED[i] + 1, Q)
        a0, a1, b0, b1 = f[2 * i], f[2 * i + 1], g[2 * i], g[2 * i + 1]
        out += [(a0 * b0 + a1 * b1 * gamma) % Q, (a0 * b1 + a1 * b0) % Q]
    return out
