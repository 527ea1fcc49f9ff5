package trust

import (
	"crypto/rand"
	"fmt"

	"github.com/gpuaas/gpuaas/pkg/fault"
)

// MinPassphraseBytes is the shortest passphrase that guards root keys, the catalog key or a backup: what a file that
// may be copied and guessed at for years needs. NewPassphrase makes a better one.
const MinPassphraseBytes = 16

// NewPassphrase makes a passphrase of 130 random bits, in letters and digits that are told apart in print.
func NewPassphrase() string { return rand.Text() }

// CheckPassphrase refuses a new passphrase that is too short. One that guards an old file is never refused.
func CheckPassphrase(passphrase string) error {
	if len(passphrase) < MinPassphraseBytes {
		return fault.New(fault.Malformed, codePassphraseShort, fmt.Sprintf(
			"The passphrase needs at least %d bytes; --generate-passphrase makes one and prints it once.", MinPassphraseBytes),
			nil)
	}
	return nil
}
