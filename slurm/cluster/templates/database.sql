CREATE DATABASE IF NOT EXISTS slurm_acct_db;
CREATE USER IF NOT EXISTS 'slurm'@'127.0.0.1' IDENTIFIED BY '$database_password';
GRANT ALL ON slurm_acct_db.* TO 'slurm'@'127.0.0.1';
