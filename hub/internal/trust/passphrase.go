package trust

import (
	"crypto/rand"
	"errors"
	"fmt"
	"io"

	"filippo.io/age"

	"github.com/gpuaas/gpuaas/pkg/fault"
)

// MinPassphraseBytes is the shortest passphrase of root keys, the catalog key or a backup: a copied file can be
// attacked for years. NewPassphrase makes a better one.
const MinPassphraseBytes = 16

// NewPassphrase makes a passphrase of 130 random bits, in letters and digits that are told apart in print.
func NewPassphrase() string { return rand.Text() }

// NewPassphraseWorkFactor is log2 of scrypt's work for a passphrase of NewPassphrase. Age's default, a second and
// 256 MiB at each use, protects a passphrase that can be guessed; 130 random bits cannot.
const NewPassphraseWorkFactor = 12

// CheckPassphrase refuses a new passphrase that is too short. One that guards an old file is never refused.
func CheckPassphrase(passphrase string) error {
	if len(passphrase) < MinPassphraseBytes {
		return fault.New(fault.Malformed, codePassphraseShort, fmt.Sprintf(
			"The passphrase needs at least %d bytes; --generate-passphrase makes one and prints it once.", MinPassphraseBytes),
			nil)
	}
	return nil
}

// Encrypt encrypts what is written to the result with the passphrase (age, scrypt recipient); Close ends it.
// workFactor is log2 of the work for one guess of the passphrase; 0 takes age's default.
func Encrypt(w io.Writer, passphrase string, workFactor int) (io.WriteCloser, error) {
	recipient, err := age.NewScryptRecipient(passphrase)
	if err != nil {
		return nil, err
	}
	if workFactor > 0 {
		recipient.SetWorkFactor(workFactor)
	}
	return age.Encrypt(w, recipient)
}

// Decrypt reads what Encrypt wrote; path names the file in a fault, and damaged makes the fault for a file that is not
// age's.
func Decrypt(r io.Reader, path, passphrase string, damaged func(cause error) error) (io.Reader, error) {
	identity, err := age.NewScryptIdentity(passphrase)
	if err != nil {
		return nil, fault.New(fault.Malformed, codePassphraseEmpty, "The passphrase is empty.", err)
	}
	plain, err := age.Decrypt(r, identity)
	if _, wrong := errors.AsType[*age.NoIdentityMatchError](err); wrong {
		return nil, fault.New(fault.Malformed, codePassphraseWrong, "The passphrase does not open "+path+".", err)
	}
	if err != nil {
		return nil, damaged(err)
	}
	return plain, nil
}
