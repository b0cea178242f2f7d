import pytest

from pillarbox.publishers.pulsar.hashing import java_hash, murmur3_hash


# From JavaStringHash and Murmur3Hash32 of Pulsar's Java client 4.2.4.
@pytest.mark.parametrize(
    ("key", "java", "murmur3"),
    [
        ("", 0, 0),
        ("a", 97, 1009084850),
        ("k7", 3372, 456769406),
        ("abc", 96354, 870159354),
        ("abcd", 2987074, 1139631978),
        ("abcde", 92599395, 1755028214),
        ("order-42", 1234255197, 1259446670),
        ("ключ", 33309882, 442048578),
        ("東京", 841051, 381620546),
        ("\U0001f4ee", 1772625, 174349951),
        ("Zoë Łódź", 140036754, 1807750309),
        ("0192f0c1-7b7e-7c3e-9d2a-3f1e5a6b7c8d", 123030868, 95666096),
        ("polygenelubricants", 0, 1101602400),  # the smallest number of Java, which has no positive one
    ],
)
def test_hashes_are_those_of_the_java_client(key: str, java: int, murmur3: int) -> None:
    assert (java_hash(key), murmur3_hash(key)) == (java, murmur3)
