package iam

import (
	"encoding/base32"
	"errors"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/gpuaas/gpuaas/pkg/fault"
)

// TestOneTimeCodesAreThoseOfTheRFC has the test vectors of RFC 6238, appendix B, for SHA-1.
func TestOneTimeCodesAreThoseOfTheRFC(t *testing.T) {
	for seconds, code := range map[uint64]string{
		59: "94287082", 1111111109: "07081804", 1111111111: "14050471", 1234567890: "89005924", 2000000000: "69279037",
		20000000000: "65353130",
	} {
		require.Equal(t, code, totpAt([]byte("12345678901234567890"), seconds/totpPeriodSeconds, len(code)))
	}
}

func TestAOneTimeCodeCountsOneStepBesideItsOwn(t *testing.T) {
	secret, now := []byte("12345678901234567890"), time.Unix(1_800_000_000, 0)
	code, step := totpAt(secret, uint64(now.Unix()/totpPeriodSeconds), totpDigits), now.Unix()/totpPeriodSeconds
	for steps, want := range map[int64]int64{-2: 0, -1: step, 0: step, 1: step, 2: 0} {
		at := now.Add(time.Duration(steps*totpPeriodSeconds) * time.Second)
		require.Equal(t, want, totpStep(secret, code, at), steps)
	}
	require.Zero(t, totpStep(secret, "", now))
	require.Zero(t, totpStep(secret, code+"0", now))
}

func TestAPasswordMatchesItsHashAlone(t *testing.T) {
	p := Password{Hash: HashPassword("correct horse battery")}
	require.Contains(t, p.Hash, "$argon2id$v=19$m=65536,t=3,p=4$")
	require.NotEqual(t, p.Hash, HashPassword("correct horse battery"))
	require.True(t, p.Matches("correct horse battery"))
	require.False(t, p.Matches("correct horse batterz"))
	require.False(t, Password{}.Matches(""))
	require.False(t, Password{Hash: "$argon2id$v=19$m=x"}.Matches(""))
}

// openSealer seals nothing.
type openSealer struct{}

func (openSealer) Seal(plain, _ []byte) ([]byte, error)  { return plain, nil }
func (openSealer) Open(sealed, _ []byte) ([]byte, error) { return sealed, nil }

func TestASecretOfOneTimeCodesHasSixteenBytesToSixtyFour(t *testing.T) {
	now := time.Unix(1_800_000_000, 0)
	for length, want := range map[int]bool{15: false, 16: true, 64: true, 65: false} {
		secret := make([]byte, length)
		step := now.Unix() / totpPeriodSeconds
		sealed, used, err := TOTP{
			Secret: base32.StdEncoding.WithPadding(base32.NoPadding).EncodeToString(secret),
			Code:   totpAt(secret, uint64(step), totpDigits),
		}.enroll(openSealer{}, "user", now)
		require.Equal(t, want, err == nil, length)
		if want {
			require.Equal(t, secret, sealed)
			require.Equal(t, step, used)
		}
	}
	_, _, err := TOTP{Secret: "no base32!", Code: "000000"}.enroll(openSealer{}, "user", now)
	require.Error(t, err)
}

// otherSealer has the key of another hub.
type otherSealer struct{ openSealer }

func (otherSealer) Open([]byte, []byte) ([]byte, error) {
	return nil, errors.New("sealed by another key")
}

// Everybody can compute the codes of an empty secret.
func TestASecretThatCannotBeOpenedIsNotAnEmptyOne(t *testing.T) {
	now := time.Unix(1_800_000_000, 0)
	_, err := CheckLogin(t.Context(), nil, otherSealer{}, Password{UserID: "user", SealedTOTP: []byte("sealed")},
		totpAt(nil, uint64(now.Unix()/totpPeriodSeconds), totpDigits), now)
	require.True(t, fault.Is(err, fault.Internal))
}
