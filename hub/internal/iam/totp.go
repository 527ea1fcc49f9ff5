package iam

import (
	"crypto/hmac"
	"crypto/sha1" //nolint:gosec // RFC 6238's default, which every authenticator app has; HMAC does not need more
	"crypto/subtle"
	"encoding/base32"
	"encoding/binary"
	"fmt"
	"strings"
	"time"
)

const (
	totpPeriodSeconds = 30
	totpDigits        = 6
	// minTOTPSecret is what RFC 4226, section 4, requires at least.
	minTOTPSecret = 16
	maxTOTPSecret = 64
)

// TOTP is the second factor that a user sets up: a secret in base32, and a code that shows that the user has it.
type TOTP struct{ Secret, Code string }

// totpAt is the code of a time step (RFC 6238, RFC 4226 section 5.3).
func totpAt(secret []byte, step uint64, digits int) string {
	mac := hmac.New(sha1.New, secret)
	_ = binary.Write(mac, binary.BigEndian, step) // a hash takes every byte
	sum := mac.Sum(nil)
	at := sum[len(sum)-1] & 0xf
	number := uint64(binary.BigEndian.Uint32(sum[at:]) & 0x7fffffff)
	modulus := uint64(1)
	for range digits {
		modulus *= 10
	}
	return fmt.Sprintf("%0*d", digits, number%modulus)
}

// totpStep returns the time step of a code, of now or one beside it; 0 for a wrong code.
func totpStep(secret []byte, code string, now time.Time) (found int64) {
	current := now.Unix() / totpPeriodSeconds
	for step := current - 1; step <= current+1; step++ {
		if subtle.ConstantTimeCompare([]byte(totpAt(secret, uint64(step), totpDigits)), []byte(code)) == 1 {
			found = step
		}
	}
	return found
}

// enroll checks the code and returns the sealed secret with the step that the code has used.
func (t TOTP) enroll(sealer Sealer, userID string, now time.Time) (sealed []byte, step int64, err error) {
	secret, err := base32.StdEncoding.WithPadding(base32.NoPadding).DecodeString(strings.ToUpper(t.Secret))
	if err != nil || len(secret) < minTOTPSecret || len(secret) > maxTOTPSecret {
		return nil, 0, invalid().WithHint("/totp/secret", "is no secret of one-time codes", "16 to 64 random bytes in base32")
	}
	if step = totpStep(secret, t.Code, now); step == 0 {
		return nil, 0, invalid().WithHint("/totp/code", "is not the code of this moment", "check the clock of your device")
	}
	sealed, err = sealer.Seal(secret, totpAAD(userID))
	return sealed, step, err
}

func totpAAD(userID string) []byte { return []byte("user_totp\x00" + userID) }
