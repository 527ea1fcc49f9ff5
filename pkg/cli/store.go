package cli

import (
	"bytes"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"syscall"

	"go.yaml.in/yaml/v3"

	"github.com/gpuaas/gpuaas/pkg/client"
	"github.com/gpuaas/gpuaas/pkg/durable"
)

// maxStoreBytes bounds the file with contexts; a larger one is not ours.
const maxStoreBytes = 1 << 20

// store is the file with all hubs that this person knows. It holds credentials: mode 0600, in a directory of mode 0700.
type store struct {
	CurrentContext string                `yaml:"current_context"`
	Contexts       map[string]hubContext `yaml:"contexts"`
}

// hubContext is one hub with the user's credential for it.
type hubContext struct {
	URL   string `yaml:"url"`
	CAPEM string `yaml:"ca_pem,omitempty"`
	// Either a token, a login with a password, or a service account.
	Token          string          `yaml:"token,omitempty"`
	Login          *login          `yaml:"login,omitempty"`
	ServiceAccount *serviceAccount `yaml:"service_account,omitempty"`
	// Project is what --project defaults to.
	Project string `yaml:"project,omitempty"`
	// name in the store; empty for the environment's.
	name string
}

type serviceAccount struct {
	ID            string `yaml:"id"`
	KeyID         string `yaml:"key_id"`
	PrivateKeyPEM string `yaml:"private_key_pem"`
}

func (c hubContext) credential(conf client.Config) (client.Credential, error) {
	switch {
	case c.ServiceAccount != nil:
		sa := c.ServiceAccount
		return client.NewServiceAccountCredential(conf, sa.ID, sa.KeyID, []byte(sa.PrivateKeyPEM))
	case c.Login != nil:
		return client.BearerToken(c.Login.AccessToken), nil
	case c.Token != "":
		return client.BearerToken(c.Token), nil
	default:
		return nil, nil //nolint:nilnil // no credential is a valid state: some operations need none
	}
}

// loadStore reads the file; a missing one is an empty store.
func loadStore(path string) (store, error) {
	s := store{Contexts: map[string]hubContext{}}
	info, err := os.Stat(path)
	if errors.Is(err, fs.ErrNotExist) {
		return s, nil
	}
	if err != nil {
		return s, usage(err)
	}
	if info.Mode().Perm()&0o077 != 0 {
		return s, usage(fmt.Errorf("%s can be read by others and holds credentials; run: chmod 600 %s", path, path))
	}
	if info.Size() > maxStoreBytes {
		return s, usage(fmt.Errorf("%s is larger than %d bytes: not a file of gpuaas", path, maxStoreBytes))
	}
	text, err := os.ReadFile(path)
	if err != nil {
		return s, usage(err)
	}
	d := yaml.NewDecoder(bytes.NewReader(text))
	d.KnownFields(true)
	if err := d.Decode(&s); err != nil {
		// The parser's text may quote a credential.
		return s, usage(fmt.Errorf("%s is not a file of gpuaas; move it away and log in again", path))
	}
	if s.Contexts == nil {
		s.Contexts = map[string]hubContext{}
	}
	return s, nil
}

// changeStore changes the file while no other command does: what that writes meanwhile, like the tokens of a refresh,
// would be lost.
func changeStore(path string, change func(*store) error) error {
	unlock, err := lockStore(path)
	if err != nil {
		return err
	}
	defer unlock()
	s, err := loadStore(path)
	if err != nil {
		return err
	}
	if err := change(&s); err != nil {
		return err
	}
	return s.save(path)
}

// lockStore waits until no other command changes the file.
func lockStore(path string) (unlock func(), err error) {
	if err := os.MkdirAll(filepath.Dir(path), 0o700); err != nil {
		return nil, err
	}
	lock, err := os.OpenFile(path+".lock", os.O_CREATE|os.O_RDWR, 0o600)
	if err != nil {
		return nil, err
	}
	if err := syscall.Flock(int(lock.Fd()), syscall.LOCK_EX); err != nil {
		return nil, errors.Join(fmt.Errorf("lock %s: %w", lock.Name(), err), lock.Close())
	}
	return func() { _ = lock.Close() }, nil
}

// save replaces the file in one step, so that an interruption leaves the old one whole.
func (s store) save(path string) (err error) {
	text, err := yaml.Marshal(s)
	if err != nil {
		return fmt.Errorf("encode contexts: %w", err)
	}
	return writePrivate(path, text)
}

// writePrivate replaces a file that only its owner can read.
func writePrivate(path string, text []byte) error {
	if err := os.MkdirAll(filepath.Dir(path), 0o700); err != nil {
		return err
	}
	return durable.Replace(path, text, 0o600)
}

func (s store) names() []string {
	names := make([]string, 0, len(s.Contexts))
	for name := range s.Contexts {
		names = append(names, name)
	}
	slices.Sort(names)
	return names
}
